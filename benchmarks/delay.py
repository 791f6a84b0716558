#!/usr/bin/env python3
"""Trains exactly and delayed, prints the tables of docs/delay.md and draws docs/delay.svg.

Usage: benchmarks/delay.py [--out FOLDER] [--jobs N] [--only NAME]... [--table-only]

Each run is one `longshore train --json`, with its server in the same process. Its output is kept in FOLDER (default: .cache/delay). Runs
found there are not repeated, so the script can be stopped and continued. All runs train on one text, fixed by TEXT, so that later runs stay
comparable. On two free cores the small model's runs take about 20 minutes, and the default job's two hours and a half.
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEEDS = (1, 2, 3)
# The text is this commit's files. Losses of two texts differ by more than those of two modes.
TEXT = "3dadd22163a6"

# The small model has a sixteenth of the default job's arithmetic in a step.
SMALL = "--layers 4 --width 64 --heads 4 --context 64 --batch 8".split()
LONG = "--steps 2000 --eval-every 400 --lr-warmup-steps 100".split()
SHORT = "--steps 500 --eval-every 100".split()
SETTINGS = {
    f"{model}, {steps} steps, learning rate {lr}": [*flags, *length, "--lr", lr]
    for model, flags in (("small", SMALL), ("default", []))
    for steps, length in ((500, SHORT), (2000, LONG))
    for lr in ("3e-3", "1e-3")
}

DELAY = ["--delay", "1", "--warmup-steps"]
MODES = {
    "exact": [],
    "look-ahead from step 300": [*DELAY, "300"],
    "look-ahead from step 100": [*DELAY, "100"],
    "no correction, from step 100": [*DELAY, "100", "--correction", "none"],
    "look-ahead from step 40": [*DELAY, "40"],
}
DRAWN = "default, 500 steps, learning rate 3e-3"
COLOURS = ("#1b1b1b", "#332288", "#56b4e9", "#d55e00", "#009e73")


def path_of(out, setting, mode, seed):
    return out / f"{setting}.{mode}.{seed}.jsonl".replace(" ", "_").replace("'", "")


def text_of(out):
    """Returns the folder of the training text. A clone must reach back to its commit."""
    text = out / "text"
    if not text.exists():
        part = out / "text.part"
        part.mkdir(exist_ok=True)
        archive = subprocess.run(["git", "archive", TEXT], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
        part.rename(text)
    return text


def run(binary, out, text, setting, mode, seed):
    path = path_of(out, setting, mode, seed)
    if path.exists():
        return
    flags = [*SETTINGS[setting], *MODES[mode], "--seed", str(seed), "--json", "--data", str(text)]
    done = subprocess.run([binary, "train", *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{setting}, {mode}, seed {seed}: {done.stderr}")
    part = path.with_suffix(".part")
    part.write_text(done.stdout)
    part.rename(path)
    print(f"done: {setting}, {mode}, seed {seed}", flush=True)


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def loss_of(path):
    """Returns the validation loss at the end of a run; None if the run is missing."""
    if not path.exists():
        return None
    return next(event for event in events(path) if event["event"] == "end")["validation_loss"]


def table(out, setting):
    """Prints a row for each mode. A missing run is a dash, and means are over the seeds that exact steps have too."""
    losses = {mode: [loss_of(path_of(out, setting, mode, seed)) for seed in SEEDS] for mode in MODES}
    if not any(loss is not None for loss in losses["exact"]):
        return
    head = "| " + " | ".join(["run", *(f"seed {seed}" for seed in SEEDS), "mean", "gap to exact"]) + " |"
    print(f"\n**{setting[0].upper() + setting[1:]}**\n\n{head}\n| --- " + "| ---: " * (len(SEEDS) + 2) + "|")
    for mode, of_mode in losses.items():
        pairs = [(mine, exact) for mine, exact in zip(of_mode, losses["exact"]) if None not in (mine, exact)]
        if not pairs:
            continue
        mean = statistics.mean(mine for mine, _ in pairs)
        gap = "" if mode == "exact" else f"{statistics.mean(mine - exact for mine, exact in pairs):+.3f}"
        shown = ["-" if loss is None else f"{loss:.3f}" for loss in of_mode]
        print(f"| {mode} | " + " | ".join(shown) + f" | {mean:.3f} | {gap} |")


def curve(out, mode):
    """Returns (step, training loss) averaged over the existing seeds, smoothed over 25 steps."""
    paths = [path_of(out, DRAWN, mode, seed) for seed in SEEDS]
    runs = [[e["loss"] for e in events(path) if e["event"] == "step"] for path in paths if path.exists()]
    means = [statistics.mean(losses) for losses in zip(*runs)]
    window = 25
    return [(end, statistics.mean(means[end - window : end])) for end in range(window, len(means) + 1, 5)]


def draw(out):
    curves = {mode: curve(out, mode) for mode in MODES}
    curves = {mode: points for mode, points in curves.items() if points}
    if not curves:
        return
    width, height, left, right, top, bottom = 760, 420, 56, 200, 24, 44
    last = max(points[-1][0] for points in curves.values())
    low = min(loss for points in curves.values() for _, loss in points) - 0.05
    high = 3.4

    def place(step, loss):
        x = left + (width - left - right) * step / last
        y = top + (height - top - bottom) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        "<title>Training loss of the default job, exact and delayed</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tenth in range(int(low * 5) + 1, int(high * 5) + 1):
        loss = tenth / 5
        (x, y), (end, _) = place(0, loss).split(","), place(last, loss).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#444">{loss:.1f}</text>')
    for step in range(0, last + 1, 100):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle" fill="#444">{step}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    parts.append(f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">')
    parts.append("training loss, nats a byte</text>")
    # Labels are placed from the lowest one up, so that none lies below the plot.
    above = height
    for mode in sorted(curves, key=lambda mode: curves[mode][-1][1]):
        colour = COLOURS[list(MODES).index(mode) % len(COLOURS)]
        points = " ".join(place(*point) for point in curves[mode] if point[1] <= high)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        x, y = map(float, place(*curves[mode][-1]).split(","))
        above = min(y + 4, above - 15)
        parts.append(f'<text x="{x + 8:.1f}" y="{above:.1f}" fill="{colour}">{mode}</text>')
    parts.append("</svg>\n")
    (ROOT / "docs/delay.svg").write_text("\n".join(parts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / ".cache/delay")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", action="append", default=[], help="only settings whose name begins so")
    parser.add_argument("--binary", help="a longshore that is built already")
    parser.add_argument("--table-only", action="store_true", help="make no runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in SETTINGS if not arguments.only or any(name.startswith(only) for only in arguments.only)]
    if not arguments.table_only:
        if not arguments.binary:
            subprocess.run(["cargo", "build", "--release", "--locked", "--bin", "longshore"], cwd=ROOT, check=True)
        binary = arguments.binary or str(ROOT / "target/release/longshore")
        text = text_of(arguments.out.resolve())
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            runs = [(setting, mode, seed) for setting in wanted for seed in SEEDS for mode in MODES]
            for _ in pool.map(lambda of: run(binary, arguments.out, text, *of), runs):
                pass
    for setting in SETTINGS:
        table(arguments.out, setting)
    draw(arguments.out)


if __name__ == "__main__":
    main()
