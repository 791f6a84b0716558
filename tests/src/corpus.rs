//! Generated training text. Tests need no data files, and the text is always the same, so hashes can be
//! compared.

use std::{fs, path::Path};

const WORDS: [&str; 12] =
    ["ship", "dock", "crane", "tide", "rope", "load", "berth", "pilot", "harbour", "wave", "the", "of"];
const FILES: usize = 3;
const WORDS_EACH: usize = 2000;

/// Writes a few files of generated words into `folder`.
pub fn write(folder: &Path) {
    let mut state = 1u32;
    for file in 0..FILES {
        let mut text = String::new();
        for word in 0..WORDS_EACH {
            // The generator of Numerical Recipes: good enough for text, and it will never change.
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            text.push_str(WORDS[(state >> 16) as usize % WORDS.len()]);
            text.push(if word % 12 == 11 { '\n' } else { ' ' });
        }
        fs::write(folder.join(format!("{file}.txt")), text).expect("writing the corpus");
    }
}
