//! `longshore completions` and `longshore man`: shell completions and manual pages of both commands.

use std::{fs, io, path::PathBuf};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use longshore_server::config::Flags;
use serde_json::json;

use crate::output::Output;

#[derive(clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell that reads them
    shell: Shell,
    /// The command that they complete
    #[arg(long, value_enum, default_value_t)]
    program: Program,
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Program {
    #[default]
    Longshore,
    Longshored,
}

#[derive(clap::Args)]
pub(super) struct ManArgs {
    /// Folder for the pages, which is made where it is absent
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Program {
    /// Returns the program's clap command. `longshore` is the command of `Program::Longshore`.
    fn command(self, longshore: &Command) -> Command {
        match self {
            Program::Longshore => longshore.clone(),
            Program::Longshored => Flags::command(),
        }
    }
}

pub(super) fn completions(longshore: &Command, args: &CompletionsArgs, out: Output) {
    let mut command = args.program.command(longshore);
    let name = command.get_name().to_string();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, &name, &mut script);
    let script = String::from_utf8_lossy(&script);
    out.result(
        || json!({"program": name, "shell": args.shell.to_string(), "script": script}),
        || script.trim_end().to_string(),
    );
}

pub(super) fn man(longshore: &Command, args: &ManArgs, out: Output) -> anyhow::Result<()> {
    let wrote = || -> io::Result<Vec<String>> {
        fs::create_dir_all(&args.out)?;
        let mut pages = Vec::new();
        for program in [Program::Longshore, Program::Longshored] {
            let mut command = program.command(longshore).disable_help_subcommand(true);
            command.build();
            write_pages(&command, "", args, &mut pages)?;
        }
        Ok(pages)
    };
    let pages = wrote().with_context(|| format!("--out {}", args.out.display()))?;
    out.result(
        || json!({"out": args.out, "pages": pages}),
        || format!("{} pages in {}: man {}/longshore.1", pages.len(), args.out.display(), args.out.display()),
    );
    Ok(())
}

/// Writes the page of one command, such as `longshore-bench-step.1`, and the pages of its subcommands.
fn write_pages(command: &Command, above: &str, args: &ManArgs, pages: &mut Vec<String>) -> io::Result<()> {
    let name = format!("{above}{}", command.get_name());
    let page = format!("{name}.1");
    let man = clap_mangen::Man::new(command.clone()).title(name.to_uppercase());
    let mut text = Vec::new();
    man.render(&mut text)?;
    fs::write(args.out.join(&page), text)?;
    pages.push(page);
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below, &format!("{name}-"), args, pages)?;
    }
    Ok(())
}
