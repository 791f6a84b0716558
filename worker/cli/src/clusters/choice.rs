//! Chooses a command's servers: flags win over the environment, which wins over the config file.

use std::path::Path;

use clap::parser::ValueSource;
use longshore_proto::{Fault, FaultKind};

use super::File;
use crate::access::Access;

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
    use ValueSource::CommandLine;
    let by_flag = |source: Option<ValueSource>| source == Some(CommandLine);
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

#[cfg(test)]
mod tests {
    use ValueSource::{CommandLine, EnvVariable};

    use super::*;

    const FILE: &str = "default-cluster = \"prod\"\n[clusters.prod]\nservers = \"p:1\"\ntls-dir = \"/prod\"\n\
                        [clusters.lab]\nservers = \"l:1,l:2\"\n";

    /// Returns the chosen servers and TLS folder.
    fn chosen(
        servers: Option<(&str, ValueSource)>,
        cluster: Option<(&str, ValueSource)>,
        wanted: Wanted,
    ) -> Result<(Vec<String>, Option<String>), Fault> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, FILE).unwrap();
        let given =
            Given { servers: servers.map(|(_, source)| source), cluster: cluster.map(|(_, source)| source) };
        let mut list: Vec<String> = servers.iter().map(|(server, _)| server.to_string()).collect();
        let mut access = Access { cluster: cluster.map(|(name, _)| name.to_string()), ..Access::default() };
        choose(&mut list, &mut access, (given, wanted), Some(&path))?;
        Ok((list, access.tls_dir.map(|dir| dir.display().to_string())))
    }

    fn plain(servers: &[&str]) -> (Vec<String>, Option<String>) {
        (servers.iter().map(ToString::to_string).collect(), None)
    }

    #[test]
    fn flags_win_over_variables_and_those_over_the_file() {
        let prod = (vec!["p:1".to_string()], Some("/prod".to_string()));
        assert_eq!(chosen(None, None, Wanted::Needed).unwrap(), prod);
        assert_eq!(chosen(None, None, Wanted::Optional).unwrap(), plain(&[]));
        for source in [CommandLine, EnvVariable] {
            assert_eq!(chosen(Some(("a:1", source)), None, Wanted::Needed).unwrap(), plain(&["a:1"]));
            assert_eq!(
                chosen(None, Some(("lab", source)), Wanted::Optional).unwrap(),
                plain(&["l:1", "l:2"])
            );
        }
        let (servers, lab) = (Some(("a:1", EnvVariable)), Some(("lab", CommandLine)));
        assert_eq!(chosen(servers, lab, Wanted::Needed).unwrap(), plain(&["l:1", "l:2"]));
        let (servers, lab) = (Some(("a:1", CommandLine)), Some(("lab", EnvVariable)));
        assert_eq!(chosen(servers, lab, Wanted::Needed).unwrap(), plain(&["a:1"]));
        let (servers, lab) = (Some(("a:1", EnvVariable)), Some(("lab", EnvVariable)));
        assert_eq!(
            chosen(servers, lab, Wanted::Needed).unwrap(),
            plain(&["a:1"]),
            "servers are the narrower word"
        );
        assert_eq!(chosen(None, Some(("lab", EnvVariable)), Wanted::ByFlag).unwrap(), plain(&[]));
        assert_eq!(chosen(None, Some(("lab", CommandLine)), Wanted::ByFlag).unwrap(), plain(&["l:1", "l:2"]));
    }

    #[test]
    fn two_flags_and_a_name_that_is_not_there_are_refused() {
        let both =
            chosen(Some(("a:1", CommandLine)), Some(("lab", CommandLine)), Wanted::Needed).unwrap_err();
        assert_eq!(both.field, "--cluster");
        let missing = chosen(None, Some(("labb", CommandLine)), Wanted::Needed).unwrap_err();
        assert!(missing.limit.contains("lab, prod") && missing.remedy.contains("`lab`"), "{missing}");
    }
}
