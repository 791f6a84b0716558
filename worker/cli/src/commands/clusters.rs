//! `longshore clusters`: the clusters of the config file.

use std::path::Path;

use serde_json::json;

use crate::{clusters::File, output::Output};

pub(super) fn run(config: Option<&Path>, out: Output) -> anyhow::Result<()> {
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
