//! Names by which the HTTP address may be asked for. A page of the internet can have its own name resolve to this address
//! (DNS rebinding), and its script would then read the pages in a user's browser.

use std::{fs, net::IpAddr};

use http::{HeaderMap, Uri, header::HOST};

/// The host's own name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Characters of a name in the refusal.
const SHOWN: usize = 80;

/// Names beside IP addresses, which no browser resolves, and names without a dot, which no public domain has.
pub(super) struct Hosts(Vec<String>);

impl Hosts {
    pub(super) fn new(configured: &[String]) -> Hosts {
        let own = fs::read_to_string(HOST_NAME).unwrap_or_default().trim().to_string();
        Hosts(configured.iter().cloned().chain([own]).filter(|name| !name.is_empty()).collect())
    }

    /// Checks the names in a request.
    ///
    /// # Errors
    /// The text of the refusal, with the name.
    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), String> {
        let in_headers =
            headers.get_all(HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
        let mut all = in_headers.chain(uri.authority().map(ToString::to_string));
        match all.find(|host| !self.has(host)) {
            Some(host) => {
                let shown: String = host.chars().take(SHOWN).collect();
                Err(format!(
                    "host is {shown:?}, but must be an IP address, a name without a dot, or a name of this server: ask by its IP address, or start \
                     longshored with --http-host and this name\n"
                ))
            }
            None => Ok(()),
        }
    }

    /// `host` may have a port.
    fn has(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        let is_short = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        address.parse::<IpAddr>().is_ok()
            || is_short
            || self.0.iter().any(|known| known.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_known_names_are_taken_and_no_others() {
        let hosts = Hosts::new(&["metrics.example.com".to_string()]);
        for good in
            ["127.0.0.1:7071", "10.0.0.7", "[::1]:7071", "localhost:7071", "host1", "metrics.example.com:1"]
        {
            assert!(hosts.has(good), "{good}");
        }
        for bad in [
            "",
            "evil.example.com:7071",
            "127.0.0.1.evil.com",
            "localhost.evil.com",
            "::1",
            "a b",
            "[::1].evil.com",
        ] {
            assert!(!hosts.has(bad), "{bad}");
        }
        let (uri, mut headers) = (Uri::from_static("/metrics"), HeaderMap::new());
        assert!(hosts.check(&uri, &headers).is_ok(), "HTTP/1.0 needs no name");
        headers.append(HOST, "localhost".parse().unwrap());
        headers.append(HOST, "evil.com".parse().unwrap());
        let said = hosts.check(&uri, &headers).unwrap_err();
        assert!(said.contains("host is \"evil.com\"") && said.contains("--http-host"), "{said}");
        assert!(hosts.check(&Uri::from_static("http://evil.com/"), &HeaderMap::new()).is_err());
    }
}
