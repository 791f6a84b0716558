//! The four styles of the terminal view.

use ratatui::style::{Color, Modifier, Style};

pub(super) fn good() -> Style {
    Style::new().fg(Color::Green)
}

pub(super) fn warn() -> Style {
    Style::new().fg(Color::Yellow)
}

pub(super) fn bad() -> Style {
    Style::new().fg(Color::Red)
}

pub(super) fn quiet() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}
