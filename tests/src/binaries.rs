//! Finds the binaries under test in the build folder, never an installed copy.

use std::{env, path::PathBuf, process::Command};

/// The environment variable that names the folder of the binaries. Without it, they are beside the test executable.
const DIR_VARIABLE: &str = "LONGSHORE_BIN_DIR";

/// Returns a command for `longshore` or `longshored`, without the caller's `LONGSHORE_*` variables.
///
/// # Panics If the binary is not built; the message says how to build it.
pub fn command(name: &str) -> Command {
    let path = folder().join(format!("{name}{}", env::consts::EXE_SUFFIX));
    assert!(
        path.is_file(),
        "there is no {}: build it first with `cargo build --release --bins`, or name the folder of the binaries in \
         {DIR_VARIABLE}",
        path.display()
    );
    without_ours(Command::new(path))
}

/// Returns the same command run by `program`, whose `arguments` stand before the binary's path.
pub fn under(name: &str, program: &str, arguments: &[String]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).arg(self::command(name).get_program());
    without_ours(command)
}

/// Removes the `LONGSHORE_*` variables: tests configure commands by flags alone.
fn without_ours(mut command: Command) -> Command {
    let ours =
        env::vars_os().map(|(name, _)| name).filter(|name| name.to_string_lossy().starts_with("LONGSHORE"));
    for variable in ours {
        command.env_remove(variable);
    }
    command
}

/// The folder of the binaries. Cargo puts test executables into its subfolder `deps`.
fn folder() -> PathBuf {
    if let Some(dir) = env::var_os(DIR_VARIABLE) {
        return dir.into();
    }
    let test = env::current_exe().expect("the path of the test executable");
    test.parent().and_then(|deps| deps.parent()).expect("a target folder above the test executable").into()
}
