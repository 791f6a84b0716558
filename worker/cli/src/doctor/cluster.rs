//! Checks the connection to each server: name, port, trust, certificate, version, clock and round trip.

use std::{
    net::IpAddr,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use longshore_proto::{FaultKind, limits::MAX_CONTROL_MESSAGE_BYTES};
use longshore_wire::{
    Channel, fault_from_status,
    tls::Credentials,
    v1::{ListJobsRequest, ListJobsResponse, admin_client::AdminClient},
};
use longshore_worker::session::{Address, untrusted, with_sources};
use tokio::{
    net::{TcpStream, lookup_host},
    time::timeout,
};

use super::{Finding, Look, bad, certificates, good, warning};
use crate::{access::Access, bench::probe, servers::PROMPTLY, sizes::human};

/// The longest wait for a name, a port or a handshake.
const PATIENCE: Duration = Duration::from_secs(5);
/// The largest difference of clocks without a warning. Logs of several hosts are read side by side, and certificates
/// have times.
const CLOCKS_APART: Duration = Duration::from_secs(5);
/// Samples of the round trip, of which the median counts.
const CALLS: usize = 21;
/// Longest round trip without a warning: with a longer one, server and host are not in one place.
const FAR: Duration = Duration::from_millis(5);
/// Speed in GB/s below which a link gets a warning: about the speed of a network of 1 Gbit/s.
const SLOW: f64 = 0.1;
/// A server with a larger part of its memory reserved has hardly room for another job.
const NEARLY_ALL: f64 = 0.95;
const SILENT: &str =
    "check that longshored runs there and is not stopped, and that address, port and firewall are right";

pub(super) fn all(look: &Look) -> anyhow::Result<Vec<Finding>> {
    if look.servers.is_empty() {
        return Ok(Vec::new());
    }
    let credentials = match look.access.credentials() {
        Ok(credentials) => credentials,
        Err(fault) => return Ok(vec![bad("TLS folder", fault.value, fault.remedy)]),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let each = look.servers.iter().map(|address| server(address, credentials.as_ref()));
    let mut findings: Vec<Finding> = credentials.as_ref().and_then(certificates::own).into_iter().collect();
    findings.extend(runtime.block_on(join_all(each)).into_iter().flatten());
    if look.speed {
        let whole = |address: &&String| {
            let name = format!("server {address}");
            findings.iter().any(|found| found.what == format!("{name} round trip"))
        };
        let reached: Vec<String> = look.servers.iter().filter(whole).cloned().collect();
        findings.extend(reached.iter().map(|address| speed(address, &look.access)));
    }
    Ok(findings)
}

/// Checks one server, up to the first failure that makes later checks impossible.
async fn server(address: &str, credentials: Option<&Credentials>) -> Vec<Finding> {
    let what = format!("server {address}");
    let checked = match Address::new(address, credentials) {
        Ok(checked) => checked,
        Err(fault) => {
            let said = format!("its address is {}, but must be {}", fault.value, fault.limit);
            return vec![bad(what, said, fault.remedy)];
        }
    };
    let mut findings = Vec::new();
    if let Some(host_and_port) = dialled(address) {
        match reach(&what, host_and_port).await {
            Ok(found) => findings.extend(found),
            Err(found) => return vec![found],
        }
    }
    let mut admin = match trust(&what, &checked, credentials).await {
        Ok(admin) => admin,
        Err(found) => {
            findings.push(found);
            return findings;
        }
    };
    if let Some((host_and_port, credentials)) = dialled(address).zip(credentials) {
        findings.extend(certificates::of_server(&what, host_and_port, credentials, PATIENCE).await);
    }
    match list(&mut admin, (address, &what), credentials).await {
        Ok((list, apart)) => {
            findings.push(version(&what, &list));
            findings.push(clock(&what, apart));
            findings.extend(room(&what, &list));
            findings.push(round_trip(&mut admin, address, &what).await);
        }
        Err(found) => findings.push(found),
    }
    findings
}

/// Returns host and port of an address, for a lookup. None for a Unix socket.
fn dialled(address: &str) -> Option<&str> {
    if address.starts_with("unix:") {
        return None;
    }
    Some(address.trim_start_matches("https://").trim_start_matches("http://"))
}

async fn reach(what: &str, host_and_port: &str) -> Result<Option<Finding>, Finding> {
    const RESOLVE: &str = "correct the name in --servers, or add it to DNS or /etc/hosts of this host";
    let host = host_and_port.rsplit_once(':').map_or(host_and_port, |(host, _)| host);
    let name = format!("{what} name");
    let found = match timeout(PATIENCE, lookup_host(host_and_port)).await {
        Ok(Ok(found)) => found.collect::<Vec<_>>(),
        Ok(Err(error)) => return Err(bad(name, format!("{host} does not resolve ({error})"), RESOLVE)),
        Err(_) => return Err(bad(name, format!("{host} is looked up for more than 5 s"), RESOLVE)),
    };
    let is_name = host.trim_matches(['[', ']']).parse::<IpAddr>().is_err();
    let dial = async {
        let mut last = None;
        for address in &found {
            match TcpStream::connect(address).await {
                Ok(_) => return None,
                Err(error) => last = Some(error.to_string()),
            }
        }
        Some(last.unwrap_or_else(|| "the name has no address".to_string()))
    };
    let port = format!("{what} port");
    match timeout(PATIENCE, dial).await {
        Ok(None) => {}
        Ok(Some(error)) => {
            let remedy = "start longshored there, or correct the port in --servers and longshored --listen";
            return Err(bad(port, format!("nothing listens ({error})"), remedy));
        }
        Err(_) => {
            let remedy = "see whether the host is up, and let its firewall and those between pass the port";
            return Err(bad(port, "no answer within 5 s", remedy));
        }
    }
    let addresses: Vec<String> = found.iter().map(|address| address.ip().to_string()).collect();
    Ok(is_name.then(|| good(name, addresses.join(", "))))
}

async fn trust(
    what: &str,
    address: &Address,
    credentials: Option<&Credentials>,
) -> Result<AdminClient<Channel>, Finding> {
    let error = match timeout(PROMPTLY, address.connect()).await {
        Ok(Ok(channel)) => {
            return Ok(AdminClient::new(channel).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES));
        }
        Ok(Err(error)) => error,
        Err(_) => return Err(bad(what, "takes connections and answers none", SILENT)),
    };
    Err(match untrusted(&error) {
        Some(fault) => bad(format!("{what} trust"), fault.value, fault.remedy),
        None => bad(what, with_sources(&error), perhaps_encrypted(credentials)),
    })
}

fn perhaps_encrypted(credentials: Option<&Credentials>) -> &'static str {
    match credentials {
        Some(_) => SILENT,
        None => {
            "if that server runs with --tls-dir, name your folder with --tls-dir; else check what listens there"
        }
    }
}

async fn list(
    admin: &mut AdminClient<Channel>,
    (address, what): (&str, &str),
    credentials: Option<&Credentials>,
) -> Result<(ListJobsResponse, Duration), Finding> {
    let asked = Instant::now();
    match timeout(PROMPTLY, admin.list_jobs(ListJobsRequest::default())).await {
        Ok(Ok(list)) => {
            let list = list.into_inner();
            let apart = clocks_apart(list.unix_micros, asked.elapsed());
            Ok((list, apart))
        }
        Ok(Err(status)) => {
            let fault = fault_from_status(&status, address);
            let said = format!("{} is {}, but must be {}", fault.field, fault.value, fault.limit);
            Err(match fault.kind {
                FaultKind::Unauthenticated | FaultKind::Forbidden => {
                    bad(format!("{what} trust"), said, fault.remedy)
                }
                FaultKind::Unavailable => bad(what, said, perhaps_encrypted(credentials)),
                _ => bad(what, said, fault.remedy),
            })
        }
        Err(_) => Err(bad(what, format!("silent for {} s", PROMPTLY.as_secs()), SILENT)),
    }
}

fn version(what: &str, list: &ListJobsResponse) -> Finding {
    let said = format!(
        "version {}, {} jobs, {} of {} reserved",
        list.release,
        list.jobs.len(),
        human(list.memory_reserved),
        human(list.memory_budget)
    );
    if list.release == env!("CARGO_PKG_VERSION") {
        return good(what, said);
    }
    let said = format!("{said}; this program is of version {}", env!("CARGO_PKG_VERSION"));
    warning(what, said, "run one version of Longshore everywhere")
}

fn clock(what: &str, apart: Duration) -> Finding {
    let what = format!("{what} clock");
    if apart <= CLOCKS_APART {
        return good(what, "as this host's");
    }
    let said = format!("{:.0} s from this host's", apart.as_secs_f64());
    warning(
        what,
        said,
        "set the hosts' clocks by NTP: their logs are read side by side, and certificates have times",
    )
}

fn room(what: &str, list: &ListJobsResponse) -> Option<Finding> {
    let nearly =
        list.memory_budget > 0 && list.memory_reserved as f64 > NEARLY_ALL * list.memory_budget as f64;
    let free = human(list.memory_budget.saturating_sub(list.memory_reserved));
    nearly.then(|| {
        let remedy = "delete jobs that are done, give the server more --memory, or add a server";
        warning(format!("{what} memory"), format!("{free} left for another job"), remedy)
    })
}

async fn round_trip(admin: &mut AdminClient<Channel>, address: &str, what: &str) -> Finding {
    let name = format!("{what} round trip");
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        match timeout(PROMPTLY, admin.list_jobs(ListJobsRequest::default())).await {
            Ok(Ok(_)) => times.push(begun.elapsed()),
            Ok(Err(status)) => return bad(name, fault_from_status(&status, address).to_string(), SILENT),
            Err(_) => return bad(name, format!("silent for {} s", PROMPTLY.as_secs()), SILENT),
        }
    }
    times.sort();
    let median = times[CALLS / 2];
    let said = format!("{:.2} ms", median.as_secs_f64() * 1e3);
    if median <= FAR {
        return good(name, said);
    }
    warning(
        name,
        said,
        "keep servers and workers in one place: a step makes some round trips; or see what loads the host",
    )
}

/// Measures pushes and pulls with a new job, and deletes the job.
fn speed(address: &str, access: &Access) -> Finding {
    let what = format!("server {address} speed");
    match probe::link(&[address.to_string()], access) {
        Ok(speed) if speed < SLOW => {
            let remedy = "see whether the route takes the fast network, and who else uses it";
            warning(what, format!("{speed:.3} GB/s"), remedy)
        }
        Ok(speed) => good(what, format!("{speed:.2} GB/s, the slower of push and pull")),
        Err(error) => bad(
            what,
            format!("{error:#}"),
            format!(
                "give the server 768 MiB of free memory, and this identity the worker's role for jobs {}*: `jobs` of \
                 the server's identities.toml",
                probe::JOB
            ),
        ),
    }
}

/// Returns the least difference between a server's clock and this host's. The server read its clock during a call
/// of duration `took`.
fn clocks_apart(theirs: u64, took: Duration) -> Duration {
    let here = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
    Duration::from_micros(here.abs_diff(theirs)).saturating_sub(took)
}
