//! Named clusters: the client's config file, and the choice of a command's servers. The file is
//! `~/.config/longshore/config.toml`, or that of `--config` or `LONGSHORE_CONFIG`. Flags win over the environment,
//! which wins over the file.

use std::{
    collections::BTreeMap,
    env, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use clap::parser::ValueSource;
use longshore_proto::{Fault, FaultKind};
use longshore_server::config::nearest;
use serde_json::json;
use toml::{Table, Value};

use crate::{access::Access, output::Output};

/// A command's need of servers when no flag or variable names any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Servers are required: the file's default cluster counts.
    Needed,
    /// The command works without servers: variables count, the default cluster does not.
    Optional,
    /// Only the command's own flags count.
    ByFlag,
}

/// Sources of a command's servers and cluster.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Given {
    pub(crate) servers: Option<ValueSource>,
    pub(crate) cluster: Option<ValueSource>,
}

/// Puts the chosen cluster's servers into `servers`, and its credentials into `access`.
///
/// # Errors
/// If flags name both servers and a cluster, if the file or the cluster cannot be used, or if required servers are
/// named nowhere.
pub(crate) fn choose(
    servers: &mut Vec<String>,
    access: &mut Access,
    (given, wanted): (Given, Wanted),
    config: Option<&Path>,
) -> Result<(), Fault> {
    let by_flag = |source: Option<ValueSource>| source == Some(ValueSource::CommandLine);
    if by_flag(given.servers) && by_flag(given.cluster) {
        let remedy = "leave one of the two flags out";
        return Err(Fault::invalid("--cluster", "given", "absent where --servers is given", remedy));
    }
    let counts = wanted != Wanted::ByFlag || by_flag(given.cluster);
    let named = access.cluster.clone().filter(|_| counts && (servers.is_empty() || by_flag(given.cluster)));
    if named.is_none() && (!servers.is_empty() || wanted != Wanted::Needed) {
        return Ok(());
    }
    let file = File::read(config)?;
    let Some(name) = named.or_else(|| file.default.clone()) else {
        let remedy = format!(
            "give --servers or LONGSHORE_SERVERS, or --cluster with a name, or set default-cluster in {}",
            file.path.display()
        );
        return Err(Fault::new(FaultKind::Invalid, "--servers", "absent", "HOST:PORT,...", remedy));
    };
    let cluster = file.cluster(&name)?;
    servers.clone_from(&cluster.servers);
    // A token of the file belongs to the file's folder.
    if access.tls_dir.is_none() {
        access.tls_dir.clone_from(&cluster.tls_dir);
        access.token_file = access.token_file.take().or_else(|| cluster.token_file.clone());
    }
    access.cluster = Some(name);
    Ok(())
}

const DEFAULT: &str = "default-cluster";
const CLUSTERS: &str = "clusters";
const SERVERS: &str = "servers";
const TLS_DIR: &str = "tls-dir";
const TOKEN_FILE: &str = "token-file";

/// Prints each cluster of `longshore clusters`, the default one marked. No server is called.
pub(crate) fn list(config: Option<&Path>, out: Output) -> anyhow::Result<()> {
    let file = File::read(config)?;
    let path = file.path.display();
    for (name, cluster) in &file.clusters {
        let default = file.default.as_ref() == Some(name);
        out.result(
            || {
                json!({
                    "cluster": name, "default": default, "servers": cluster.servers, "tls_dir": cluster.tls_dir,
                    "token_file": cluster.token_file, "config": file.path,
                })
            },
            || {
                let mark = if default { "*" } else { " " };
                let how = if cluster.tls_dir.is_some() { "TLS" } else { "plain" };
                format!("{mark} {name}  {}  {how}", cluster.servers.join(","))
            },
        );
    }
    if file.clusters.is_empty() && !out.is_json() {
        say!("no clusters: write [clusters.NAME] with servers = \"HOST:PORT,...\" into {path}");
    }
    Ok(())
}

#[derive(Debug, Default, PartialEq, Eq)]
struct File {
    path: PathBuf,
    default: Option<String>,
    clusters: BTreeMap<String, ClusterEntry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClusterEntry {
    servers: Vec<String>,
    tls_dir: Option<PathBuf>,
    token_file: Option<PathBuf>,
}

impl File {
    /// Reads the named file, or the usual one, which may be absent.
    ///
    /// # Errors
    /// If the file cannot be read or has invalid contents. The fault's field is the file with the key.
    fn read(named: Option<&Path>) -> Result<File, Fault> {
        let usual = usual_place(|name| env::var_os(name).map(PathBuf::from));
        let Some(path) = named.map(Path::to_path_buf).or(usual) else { return Ok(File::default()) };
        match fs::read_to_string(&path) {
            Ok(text) => File::parse(&path, &text),
            Err(error) if named.is_none() && error.kind() == ErrorKind::NotFound => {
                Ok(File { path, ..File::default() })
            }
            Err(error) => {
                let remedy = "name a readable TOML file with --config or LONGSHORE_CONFIG";
                let limit = "a file that can be read";
                Err(Fault::new(FaultKind::Precondition, path.display().to_string(), error, limit, remedy))
            }
        }
    }

    fn parse(path: &Path, text: &str) -> Result<File, Fault> {
        let keys = Keys { path };
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.to_string().replace('\n', " ");
            Fault::invalid(
                path.display().to_string(),
                line,
                "TOML",
                "correct the file: docs/cli.md shows one",
            )
        })?;
        keys.check("", &table, &[DEFAULT, CLUSTERS])?;
        let mut file = File { path: path.to_path_buf(), ..File::default() };
        file.default = keys.text("", &table, DEFAULT)?;
        if let Some(clusters) = table.get(CLUSTERS) {
            let all = clusters.as_table().ok_or_else(|| keys.wrong(CLUSTERS, clusters, "a table"))?;
            for (name, value) in all {
                let prefix = format!("{CLUSTERS}.{name}.");
                let cluster = value.as_table().ok_or_else(|| keys.wrong(&prefix, value, "a table"))?;
                file.clusters.insert(name.clone(), keys.cluster(&prefix, cluster)?);
            }
        }
        if let Some(name) = &file.default {
            file.cluster(name).map_err(|fault| Fault { field: keys.at(DEFAULT), ..fault })?;
        }
        Ok(file)
    }

    fn cluster(&self, name: &str) -> Result<&ClusterEntry, Fault> {
        self.clusters.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.clusters.keys().map(String::as_str).collect();
            let limit = if known.is_empty() { "none".to_string() } else { known.join(", ") };
            let remedy = match nearest(name, known) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => format!("add [clusters.{name}] with its servers"),
            };
            let limit = format!("a cluster of {}, which has {limit}", self.path.display());
            Fault::new(FaultKind::NotFound, "--cluster", name, limit, remedy)
        })
    }
}

/// Returns the usual path, by the XDG base directories.
fn usual_place(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // The XDG specification says to ignore a relative path.
    let xdg = variable("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
    let folder = xdg.or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("longshore/config.toml"))
}

struct Keys<'a> {
    path: &'a Path,
}

impl Keys<'_> {
    fn at(&self, key: &str) -> String {
        format!("{}: {}", self.path.display(), key.trim_end_matches('.'))
    }

    fn wrong(&self, key: &str, value: &Value, limit: &str) -> Fault {
        Fault::invalid(self.at(key), value, limit, "correct the file: docs/cli.md shows one")
    }

    fn check(&self, prefix: &str, table: &Table, known: &[&str]) -> Result<(), Fault> {
        let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(()) };
        let remedy = match nearest(key, known.iter().copied()) {
            Some(nearest) => format!("did you mean `{nearest}`?"),
            None => "take the key out".to_string(),
        };
        let limit = format!("one of {}", known.join(", "));
        Err(Fault::invalid(self.at(&format!("{prefix}{key}")), "an unknown key", limit, remedy))
    }

    fn text(&self, prefix: &str, table: &Table, key: &str) -> Result<Option<String>, Fault> {
        let Some(value) = table.get(key) else { return Ok(None) };
        let text = value.as_str().filter(|text| !text.is_empty());
        let wrong = || self.wrong(&format!("{prefix}{key}"), value, "a text");
        text.map(|text| Some(text.to_string())).ok_or_else(wrong)
    }

    /// Reads a path. A relative path begins at the file's folder, and `~/` at the user's.
    fn path(&self, prefix: &str, table: &Table, key: &str) -> Result<Option<PathBuf>, Fault> {
        let Some(text) = self.text(prefix, table, key)? else { return Ok(None) };
        let home = text.strip_prefix("~/").zip(env::var_os("HOME"));
        let folder = self.path.parent().unwrap_or(Path::new("."));
        Ok(Some(home.map_or_else(|| folder.join(&text), |(rest, home)| Path::new(&home).join(rest))))
    }

    fn cluster(&self, prefix: &str, table: &Table) -> Result<ClusterEntry, Fault> {
        self.check(prefix, table, &[SERVERS, TLS_DIR, TOKEN_FILE])?;
        let key = format!("{prefix}{SERVERS}");
        let limit = "host:port, several with commas, or a list of them";
        let servers = match table.get(SERVERS) {
            Some(Value::String(text)) => text.split(',').map(|one| one.trim().to_string()).collect(),
            Some(value @ Value::Array(all)) => all
                .iter()
                .map(|one| one.as_str().map(str::to_string).ok_or_else(|| self.wrong(&key, value, limit)))
                .collect::<Result<Vec<_>, _>>()?,
            Some(value) => return Err(self.wrong(&key, value, limit)),
            None => Vec::new(),
        };
        if servers.is_empty() || servers.iter().any(String::is_empty) {
            return Err(Fault::invalid(
                self.at(&key),
                "absent or empty",
                limit,
                "name the cluster's servers",
            ));
        }
        let tls_dir = self.path(prefix, table, TLS_DIR)?;
        let token_file = self.path(prefix, table, TOKEN_FILE)?;
        if tls_dir.is_none() && token_file.is_some() {
            let remedy =
                "name the folder of the servers' ca.pem with tls-dir: a token is sent encrypted alone";
            return Err(Fault::invalid(
                self.at(&format!("{prefix}{TOKEN_FILE}")),
                "given",
                "beside tls-dir",
                remedy,
            ));
        }
        Ok(ClusterEntry { servers, tls_dir, token_file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/etc/x/config.toml";

    fn read(text: &str) -> Result<File, Fault> {
        File::parse(Path::new(PATH), text)
    }

    #[test]
    fn what_it_cannot_say_is_refused_with_the_file_and_the_key() {
        for (text, field, remedy) in [
            ("default-clusters = \"a\"", "default-clusters", "did you mean `default-cluster`?"),
            (
                "[clusters.a]\nservers = \"x\"\ntls_dir = \"y\"",
                "clusters.a.tls_dir",
                "did you mean `tls-dir`?",
            ),
            ("[clusters.a]\ntls-dir = \"y\"", "clusters.a.servers", "name the cluster's servers"),
            ("[clusters.a]\nservers = 3", "clusters.a.servers", "docs/cli.md"),
            ("[clusters]\na = 3", "clusters.a", "docs/cli.md"),
            ("[clusters.a]\nservers = \"x\"\ntoken-file = \"y\"", "clusters.a.token-file", "encrypted alone"),
            ("default-cluster = \"prdo\"\n[clusters.prod]\nservers = \"x\"", "default-cluster", "`prod`"),
        ] {
            let fault = read(text).unwrap_err();
            assert_eq!(fault.field, format!("{PATH}: {field}"), "{fault}");
            assert!(fault.remedy.contains(remedy), "{fault}");
        }
        assert_eq!(read("servers = ").unwrap_err().field, PATH);
    }
}
