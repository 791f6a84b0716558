"""A preprocessor of mdBook: a link to a file that is no page of the book becomes its text and the file's path in the repository.

mdBook would leave such a link as it is, and it would lead nowhere from where a book is read.
"""

import json
import posixpath
import re
import sys

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages(items):
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from pages(item["Chapter"]["sub_items"])


def rewrite(match, folder, known):
    text, target = match.groups()
    path = target.partition("#")[0]
    if not path or "://" in path:
        return match.group()
    inside = posixpath.normpath(posixpath.join(folder, path))
    if inside in known:
        return match.group()
    here = posixpath.normpath(posixpath.join("docs", inside))
    return f"{text}" if here in text else f"{text} (`{here}`)"


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    chapters = list(pages(book.get("items", book.get("sections", []))))
    known = {chapter["path"] for chapter in chapters if chapter["path"]}
    for chapter in chapters:
        folder = posixpath.dirname(chapter["path"] or "")
        chapter["content"] = LINK.sub(lambda match: rewrite(match, folder, known), chapter["content"])
    json.dump(book, sys.stdout)


main()
