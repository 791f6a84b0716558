//! Lines on stdout, whose reader may leave.

/// Prints as `println!` does, which would end the process with a panic when a reader such as `head` has seen enough.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}
