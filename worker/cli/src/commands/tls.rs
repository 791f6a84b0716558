//! `longshore tls`: certificates and tokens for servers and clients.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use anyhow::ensure;
use serde_json::json;

use crate::{
    output::{Output, wrong_use},
    tls::{Authority, CA_KEY, NewFolder, Subject, check_host, write_identities},
};

#[derive(clap::Subcommand)]
pub(super) enum Tls {
    /// Make an authority, a certificate for the servers, and certificates and tokens for an operator, a worker and a reader
    Init(InitArgs),
    /// Make one more certificate or token of an authority that `init` made: for one more identity, or in place of an old one
    Issue(IssueArgs),
}

#[derive(clap::Args)]
pub(super) struct InitArgs {
    /// New folder for all of it
    dir: PathBuf,
    /// Names and addresses that servers are dialled by; localhost is among them always
    #[arg(long, value_delimiter = ',', required = true, value_name = "HOST,...")]
    hosts: Vec<String>,
    /// How long certificates are valid; the authority's own is so for ten years
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// Make no tokens, so that a connection without a certificate is refused before any call
    #[arg(long)]
    no_tokens: bool,
}

#[derive(clap::Args)]
pub(super) struct IssueArgs {
    /// The folder that `longshore tls init` made
    dir: PathBuf,
    /// New folder for what is made
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    subject: SubjectArgs,
    /// How long the certificate is valid
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
}

#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct SubjectArgs {
    /// A server's certificate, for these names and addresses
    #[arg(long, value_delimiter = ',', value_name = "HOST,...")]
    hosts: Vec<String>,
    /// A client's certificate, for the identity of this name
    #[arg(long, value_name = "NAME")]
    client: Option<String>,
    /// A token; its hash for identities.toml is printed
    #[arg(long)]
    token: bool,
}

/// Identities of a new cluster: name, roles, purpose.
const IDENTITIES: [(&str, &str, &str); 3] = [
    ("operator", "\"operator\", \"reader\"", "deletes, pauses, restores, scales, drains"),
    ("worker", "\"worker\"", "trains"),
    ("reader", "\"reader\"", "looks, pulls, exports"),
];

/// Identity of a server that calls another server.
const SERVER: &str = "server";

impl Tls {
    pub(super) fn run(&self, out: Output) -> anyhow::Result<()> {
        match self {
            Tls::Init(args) => init(args, out),
            Tls::Issue(args) => issue(args, out),
        }
    }
}

fn init(args: &InitArgs, out: Output) -> anyhow::Result<()> {
    let dir = &args.dir;
    args.hosts.iter().try_for_each(|host| check_host(host)).map_err(wrong_use)?;
    let folder = NewFolder::make(dir)?;
    let authority = Authority::create(dir)?;
    let server = dir.join("server");
    authority.issue(&server, &Subject::Server(&with_localhost(&args.hosts)), args.days)?;
    let mut identities = String::from(
        "# Who may call this server, and what: docs/secure.md. A change is taken up while the server runs.\n",
    );
    for (name, roles, what) in IDENTITIES {
        authority.issue(&dir.join(name), &Subject::Client(name), args.days)?;
        identities.push_str(&format!(
            "\n# {what}\n[[identity]]\nname = \"{name}\"\nroles = [{roles}]\njobs = [\"*\"]\n"
        ));
        if !args.no_tokens {
            let hash = authority.token(&dir.join(format!("{name}-token")))?;
            identities.push_str(&format!("tokens_sha256 = [\"{hash}\"]\n"));
        }
    }
    // A server fetches the shards that move to it from other servers, so it needs a client's certificate.
    authority.issue_into(&server, &Subject::Client(SERVER), args.days)?;
    identities.push_str(&format!(
        "\n# fetches shards from other servers\n[[identity]]\nname = \"{SERVER}\"\nroles = [\"worker\"]\njobs = [\"*\"]\n"
    ));
    write_identities(&server, &identities)?;
    folder.keep();
    if out.is_json() {
        say!("{}", made(dir, args));
    } else {
        say_what_goes_where(dir, args);
    }
    Ok(())
}

fn made(dir: &Path, args: &InitArgs) -> serde_json::Value {
    let identity = |(name, _, _): (&str, &str, &str)| {
        let token = (!args.no_tokens).then(|| dir.join(format!("{name}-token")));
        json!({"name": name, "dir": dir.join(name), "token_dir": token})
    };
    let identities: Vec<_> = IDENTITIES.into_iter().map(identity).collect();
    json!({"dir": dir, "server": dir.join("server"), "ca_key": dir.join(CA_KEY), "identities": identities})
}

fn say_what_goes_where(dir: &Path, args: &InitArgs) {
    let shown = |name: &str| dir.join(name).display().to_string();
    say!("{}    to each server:    longshored --tls-dir server --listen 0.0.0.0:7070", shown("server"));
    let host = args.hosts.first().map_or("host", String::as_str);
    for (name, _, what) in IDENTITIES {
        say!(
            "{}    to whoever {what}:    --servers {host}:7070 --tls-dir {name}, or LONGSHORE_TLS_DIR",
            shown(name)
        );
    }
    if !args.no_tokens {
        say!("{}    instead, where a token is handier than a certificate", shown("NAME-token"));
    }
    say!("{}    nowhere: keep it, `longshore tls issue` makes more certificates with it", shown(CA_KEY));
}

fn issue(args: &IssueArgs, out: Output) -> anyhow::Result<()> {
    args.subject.hosts.iter().try_for_each(|host| check_host(host)).map_err(wrong_use)?;
    let (authority, subject) = (Authority::open(&args.dir)?, &args.subject);
    let dir = args.out.display();
    let (of, hash, next) = if subject.token {
        let hash = authority.token(&args.out)?;
        let next =
            format!("add tokens_sha256 = [\"{hash}\"] to an identity in each server's identities.toml");
        ("token", Some(hash), next)
    } else if let Some(name) = &subject.client {
        authority.issue(&args.out, &Subject::Client(name), args.days)?;
        let next =
            format!("list an identity with name = {name:?} in each server's identities.toml, if it is new");
        ("client", None, next)
    } else {
        ensure!(!subject.hosts.is_empty(), "--hosts names no host");
        authority.issue(&args.out, &Subject::Server(&with_localhost(&subject.hosts)), args.days)?;
        let next = "copy its server.pem and server.key over a server's; it takes them up while it runs";
        ("server", None, next.to_string())
    };
    out.result(
        || json!({"dir": args.out, "of": of, "token_sha256": hash, "next": next}),
        || format!("{dir}: {next}"),
    );
    Ok(())
}

/// Returns the hosts, and the names by which processes on the server's own host dial the server.
fn with_localhost(hosts: &[String]) -> Vec<String> {
    let (v4, v6) = (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST));
    let mut all = hosts.to_vec();
    for local in ["localhost".to_string(), v4.to_string(), v6.to_string()] {
        if !all.contains(&local) {
            all.push(local);
        }
    }
    all
}
