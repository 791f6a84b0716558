//! Checks how long certificates stay valid: the client's own, and each server's.

use std::time::{Duration, SystemTime};

use longshore_wire::tls::Credentials;
use tokio::{net::TcpStream, time::timeout};

use super::{Finding, bad, good, warning};

/// Certificates that expire sooner get a warning. A run that begins now may take weeks, and connections end with their
/// certificate. `longshore tls` makes certificates for 365 days by default: the warning covers their last month.
const SOON: Duration = Duration::from_secs(30 * DAY_SECONDS);
const DAY_SECONDS: u64 = 24 * 3600;
const OWN: &str = "make a new one with `longshore tls issue`, and put its client.pem and client.key into the folder: the \
                   next connection uses them, without a restart";
const SERVERS: &str = "make a new one with `longshore tls issue --hosts`, and copy its server.pem and server.key over the \
                       server's: it takes them up without a restart";

/// Checks the client's own certificate. None if its folder has only a token.
pub(super) fn own(credentials: &Credentials) -> Option<Finding> {
    Some(judge("TLS folder", "its certificate", credentials.expires()?, OWN))
}

/// Checks how long a server's certificate stays valid. The client has already verified the certificate.
pub(super) async fn of_server(
    what: &str,
    host_and_port: &str,
    credentials: &Credentials,
    patience: Duration,
) -> Option<Finding> {
    let name = format!("{what} certificate");
    let host = host_and_port.rsplit_once(':').map_or(host_and_port, |(host, _)| host);
    let asked = async {
        let socket = TcpStream::connect(host_and_port).await?;
        // `host` may keep the brackets of an IPv6 address.
        credentials.expiry_of(socket, host.trim_matches(['[', ']'])).await
    };
    let error = match timeout(patience, asked).await {
        Ok(Ok(expires)) => return Some(judge(&name, "it", expires?, SERVERS)),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no handshake within {} s", patience.as_secs()),
    };
    Some(bad(
        name,
        error,
        "ask again: the server took a connection a moment before, so see what it does and logs",
    ))
}

fn judge(name: &str, it: &str, expires: SystemTime, remedy: &str) -> Finding {
    match expires.duration_since(SystemTime::now()) {
        Ok(left) if left >= SOON => good(name, format!("{it} expires in {}", days(left))),
        Ok(left) => warning(name, format!("{it} expires in {}", days(left)), remedy),
        Err(error) => bad(name, format!("{it} expired {} ago", days(error.duration())), remedy),
    }
}

/// Formats whole days, so that no reader counts on a part of a day.
fn days(time: Duration) -> String {
    match time.as_secs() / DAY_SECONDS {
        0 => "less than a day".into(),
        1 => "1 day".into(),
        days => format!("{days} days"),
    }
}
