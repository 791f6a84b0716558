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
use serde::{Deserialize, Deserializer};
use serde_json::json;

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
/// - If flags name both servers and a cluster.
/// - If the file or the cluster cannot be used.
/// - If required servers are named nowhere.
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
    let Some(name) = named.or_else(|| file.default_cluster.clone()) else {
        let remedy = format!(
            "give --servers or LONGSHORE_SERVERS, or --cluster with a name, or set default-cluster in {}",
            file.path.display()
        );
        return Err(Fault::new(FaultKind::Invalid, "--servers", "absent", "HOST:PORT,...", remedy));
    };
    let cluster = file.cluster(&name)?;
    servers.clone_from(&cluster.servers);
    // The cluster's token is valid with the cluster's authority alone, so it counts only with that TLS folder.
    if access.tls_dir.is_none() {
        access.tls_dir.clone_from(&cluster.tls_dir);
        access.token_file = access.token_file.take().or_else(|| cluster.token_file.clone());
    }
    access.cluster = Some(name);
    Ok(())
}

/// Prints each cluster of `longshore clusters`, the default one marked. No server is called.
pub(crate) fn list(config: Option<&Path>, out: Output) -> anyhow::Result<()> {
    let file = File::read(config)?;
    let path = file.path.display();
    for (name, cluster) in &file.clusters {
        let default = file.default_cluster.as_ref() == Some(name);
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

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    #[serde(skip)]
    path: PathBuf,
    default_cluster: Option<String>,
    #[serde(default)]
    clusters: BTreeMap<String, ClusterEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ClusterEntry {
    #[serde(deserialize_with = "addresses")]
    servers: Vec<String>,
    tls_dir: Option<PathBuf>,
    token_file: Option<PathBuf>,
}

/// Servers of a cluster in the file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "servers must be host:port, several with commas, or a list of them")]
enum Addresses {
    Text(String),
    List(Vec<String>),
}

fn addresses<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(match Addresses::deserialize(from)? {
        Addresses::Text(text) => text.split(',').map(|one| one.trim().to_string()).collect(),
        Addresses::List(list) => list,
    })
}

impl File {
    /// Reads the named file, or the usual one, which may be absent.
    ///
    /// # Errors
    /// If the file cannot be read or has invalid contents. The fault's field is the file with the key.
    fn read(named: Option<&Path>) -> Result<File, Fault> {
        let Some(path) = named.map(Path::to_path_buf).or_else(usual_place) else {
            return Ok(File::default());
        };
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
        let wrong = |key: String, value: &str, limit: &str| {
            let field = format!("{}{key}", path.display());
            Fault::invalid(field, value, limit, "correct the file: docs/cli.md shows one")
        };
        let mut file: File = toml::from_str(text).map_err(|error| {
            let line = error.to_string().trim().replace('\n', " ");
            wrong(String::new(), &line, "clusters in TOML")
        })?;
        file.path = path.to_path_buf();
        let folder = path.parent().unwrap_or(Path::new("."));
        for (name, cluster) in &mut file.clusters {
            if cluster.servers.is_empty() || cluster.servers.iter().any(String::is_empty) {
                return Err(wrong(format!(": clusters.{name}.servers"), "empty", "the cluster's servers"));
            }
            if cluster.tls_dir.is_none() && cluster.token_file.is_some() {
                let limit = "beside tls-dir: a token is sent encrypted alone";
                return Err(wrong(format!(": clusters.{name}.token-file"), "given", limit));
            }
            let places = [&mut cluster.tls_dir, &mut cluster.token_file].into_iter().flatten();
            places.for_each(|place| *place = settled(folder, place));
        }
        if let Some(name) = &file.default_cluster {
            let field = format!("{}: default-cluster", path.display());
            file.cluster(name).map_err(|fault| Fault { field, ..fault })?;
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
fn usual_place() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).map(PathBuf::from);
    // The XDG specification demands that a relative path is ignored.
    let xdg = variable("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
    let folder = xdg.or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(folder.join("longshore/config.toml"))
}

/// Returns a path of the file. A relative path begins at the file's folder, and `~/` at the user's.
fn settled(folder: &Path, path: &Path) -> PathBuf {
    match path.strip_prefix("~").ok().zip(env::var_os("HOME")) {
        Some((rest, home)) => Path::new(&home).join(rest),
        None => folder.join(path),
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
        for (text, said) in [
            ("default-clusters = \"a\"", "unknown field `default-clusters`"),
            (
                "[clusters.a]\nservers = \"x\"\ntls_dir = \"y\"",
                "`tls_dir`, expected one of `servers`, `tls-dir`",
            ),
            ("[clusters.a]\ntls-dir = \"y\"", "missing field `servers`"),
            ("[clusters.a]\nservers = 3", "servers must be host:port"),
            ("[clusters]\na = 3", "docs/cli.md"),
            ("servers = ", "clusters in TOML"),
            ("[clusters.a]\nservers = \"x, \"", "clusters.a.servers is empty"),
            ("[clusters.a]\nservers = \"x\"\ntoken-file = \"y\"", "clusters.a.token-file is given"),
            ("default-cluster = \"prdo\"\n[clusters.prod]\nservers = \"x\"", "did you mean `prod`"),
        ] {
            let fault = read(text).unwrap_err().to_string();
            assert!(fault.starts_with(PATH) && fault.contains(said), "{fault}");
        }
    }
}
