//! Text from outside, made safe for terminals, logs and statuses. Escapes replace characters that act instead of being
//! read, as those that clear a screen.

use std::borrow::Cow;

/// Returns the text with control characters, marks of direction and invisible characters as `\n` or `\u202e`. JSON
/// reads these escapes too.
pub fn legible(text: &str) -> Cow<'_, str> {
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        match letter {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            letter if acts(letter) => letter
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| shown.push_str(&format!("\\u{unit:04x}"))),
            letter => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

/// Does the same as [`legible`], except that ends of lines stay.
pub fn legible_lines(text: &str) -> Cow<'_, str> {
    if !text.contains(|letter| letter != '\n' && acts(letter)) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.split('\n').map(legible).collect::<Vec<_>>().join("\n"))
}

fn acts(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_stay_and_what_acts_is_escaped() {
        for plain in ["", "gpt-2", "C:\\x \"é\" 日本 ok"] {
            assert!(matches!(legible(plain), Cow::Borrowed(same) if same == plain));
        }
        assert_eq!(legible("a\nb\r\t\u{1b}[2J\u{9b}"), "a\\nb\\r\\t\\u001b[2J\\u009b");
        assert_eq!(legible("x\u{202e}y\u{2066}\u{200b}\u{e0041}"), "x\\u202ey\\u2066\\u200b\\udb40\\udc41");
        assert_eq!(legible_lines("a\n\u{1b}b\n"), "a\n\\u001bb\n");
    }
}
