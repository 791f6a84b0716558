//! Output of commands: text for people, or JSON for programs. Only a run's own report is printed elsewhere.

use std::{
    fmt,
    io::{self, Write},
    sync::{Mutex, PoisonError},
};

use anyhow::Context;
use longshore_proto::{Fault, legible, legible_lines};
use longshore_worker::error::Error;
use serde_json::{Value, json};

use crate::servers::Unanswered;

/// Prints a line as `println!` does, but without panics, and with characters that command a terminal escaped. See
/// [`check_printed`].
macro_rules! say {
    ($($text:tt)*) => {
        $crate::output::print(&longshore_proto::legible_lines(&format!($($text)*)))
    };
}

/// Prints a line as `say!` does, but on stderr.
macro_rules! say_aside {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "{}", longshore_proto::legible_lines(&format!($($text)*)));
    }};
}

/// First error of stdout since the program's start or the last [`check_printed`].
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes a line to stdout. An error does not end the command; [`check_printed`] returns it.
pub(crate) fn print(line: &str) {
    let mut stdout = io::stdout().lock();
    note(writeln!(stdout, "{line}").and_then(|()| stdout.flush()));
}

fn note(written: io::Result<()>) {
    let Err(error) = written else { return };
    // A reader such as `head` has closed the pipe, since it has seen enough.
    if error.kind() != io::ErrorKind::BrokenPipe {
        LOST.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Returns the first error of stdout, as of a full disk.
pub(crate) fn check_printed() -> anyhow::Result<()> {
    let lost = LOST.lock().unwrap_or_else(PoisonError::into_inner).take();
    lost.map_or(Ok(()), |error| Err(error).context("the results could not be written to stdout"))
}

const PLAIN: &str = "ERROR";
const USAGE: &str = "USAGE";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    #[default]
    Text,
    Json,
}

/// How results and errors are printed, the same for every command.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct Output {
    /// Results as text; or as JSON on stdout, one object a line, and an error as one object on stderr
    #[arg(
        long = "output",
        id = "output",
        global = true,
        env = "LONGSHORE_OUTPUT",
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true,
        help_heading = "Output"
    )]
    format: Format,
    /// Results as --output json has them, and errors as text
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
}

impl Output {
    /// Returns true if results are JSON. Errors may still be text.
    pub(crate) fn is_json(self) -> bool {
        self.json || self.format == Format::Json
    }

    pub(crate) fn errors_are_json(self) -> bool {
        self.format == Format::Json
    }

    pub(crate) fn result(self, object: impl FnOnce() -> Value, text: impl FnOnce() -> String) {
        if self.is_json() {
            say!("{}", object());
        } else {
            say!("{}", text());
        }
    }
}

/// Wrong arguments: nothing was tried. Displayed as the inner error.
#[derive(Debug)]
pub(crate) struct WrongUse(pub(crate) anyhow::Error);

impl fmt::Display for WrongUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for WrongUse {}

pub(crate) fn wrong_use(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WrongUse(error.into()).into()
}

/// Prints an error as the last line on stderr, and returns `code`.
pub(crate) fn fail(failed: &anyhow::Error, code: u8, as_json: bool) -> u8 {
    // If the terminal is gone, the exit code still tells of the failure.
    let _ = match as_json {
        true => writeln!(io::stderr(), "{}", legible(&error(failed, code).to_string())),
        false => writeln!(io::stderr(), "longshore: {}", legible_lines(&format!("{failed:#}"))),
    };
    code
}

pub(crate) fn error(error: &anyhow::Error, exit_code: u8) -> Value {
    let fault = error.chain().find_map(fault);
    let field = |of: fn(&Fault) -> &String| fault.map(of);
    json!({"error": {
        "kind": fault.map_or(PLAIN, |fault| fault.kind.name()),
        "message": format!("{error:#}"),
        "field": field(|fault| &fault.field),
        "value": field(|fault| &fault.value),
        "limit": field(|fault| &fault.limit),
        "remedy": field(|fault| &fault.remedy),
        "exit_code": exit_code,
    }})
}

fn fault<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Fault> {
    if let Some(fault) = error.downcast_ref::<Fault>() {
        return Some(fault);
    }
    if let Some(unanswered) = error.downcast_ref::<Unanswered>() {
        return Some(&unanswered.fault);
    }
    match error.downcast_ref::<Error>()? {
        Error::Invalid(invalid) => Some(&invalid.0),
        Error::Call(call) => Some(&call.fault),
        Error::Untrusted(untrusted) => Some(&untrusted.fault),
        Error::Refused(refused) => Some(&refused.fault),
        Error::Fenced(fenced) => Some(&fenced.fault),
        Error::Outdated(outdated) => Some(&outdated.fault),
        _ => None,
    }
}

pub(crate) fn usage(error: &clap::Error) -> Value {
    use clap::error::{ContextKind, ContextValue};
    let get = |kind: ContextKind| {
        error.get(kind).map(|value| match value {
            ContextValue::Strings(all) => all.join(", "),
            other => other.to_string(),
        })
    };
    let suggested =
        [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    let nearest = suggested.into_iter().find_map(get);
    let text = error.render().to_string();
    let message = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_string();
    json!({"error": {
        "kind": USAGE,
        "message": message,
        "field": get(ContextKind::InvalidArg).or_else(|| get(ContextKind::InvalidSubcommand)),
        "value": get(ContextKind::InvalidValue),
        "limit": get(ContextKind::ValidValue),
        "remedy": nearest.map_or_else(|| "see --help".to_string(), |nearest| format!("did you mean {nearest}?")),
        "exit_code": error.exit_code(),
    }})
}
