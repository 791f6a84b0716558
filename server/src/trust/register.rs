//! The current TLS folder, read again when its files change. Open connections stay open.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use longshore_proto::{Fault, FaultKind};
use longshore_wire::{
    direct::{Connection, Kept, Owner},
    tls::{self, CA, Certificates, IDENTITIES, SERVER_CERTIFICATE, SERVER_KEY},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use super::identities::{Credential, Identities};
use crate::{
    lock::lock,
    quota::{Listed, Owners, Quota},
};

/// Interval between reads of the files. A change is taken up once two reads agree, since several files are seldom
/// replaced at one instant.
const LOOK: Duration = Duration::from_millis(500);
const FILES: [&str; 4] = [CA, SERVER_CERTIFICATE, SERVER_KEY, IDENTITIES];

/// A server's certificate, the authorities of its clients' certificates, and the identities.
pub(crate) struct Register {
    dir: PathBuf,
    now: Mutex<Arc<Known>>,
    /// Newest contents read, if they are not in use: they are still changing, or unusable.
    seen: Mutex<Option<Seen>>,
    changes: watch::Sender<()>,
    pub(super) presences: Arc<Presences>,
}

/// Contents of one read.
pub(super) struct Known {
    contents: Contents,
    pub(super) identities: Identities,
    pub(super) tls: tls::Server,
    pub(super) pages: tls::Pages,
    /// Earliest expiry of the certificates of each file.
    expires: Vec<(&'static str, SystemTime)>,
}

struct Seen {
    contents: Contents,
    /// The contents are unusable, and a warning was logged.
    refused: bool,
}

/// Bytes of all files; None for an unreadable file.
type Contents = Vec<Option<Vec<u8>>>;

impl Register {
    /// Reads the folder.
    ///
    /// # Errors
    /// If a file is missing or unusable.
    pub(crate) fn open(dir: &Path) -> Result<Arc<Register>, Fault> {
        let now = Mutex::new(Arc::new(read(dir, contents(dir))?));
        Ok(Arc::new(Register {
            dir: dir.into(),
            now,
            seen: Mutex::default(),
            changes: watch::Sender::default(),
            presences: Arc::default(),
        }))
    }

    pub(super) fn now(&self) -> Arc<Known> {
        lock(&self.now).clone()
    }

    /// Returns a channel that signals each later change.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Returns whether the folder has changed and cannot be used, so that its earlier contents are still in use.
    pub(crate) fn is_unusable(&self) -> bool {
        lock(&self.seen).as_ref().is_some_and(|seen| seen.refused)
    }

    /// Returns each file of certificates in use, and the earliest expiry among its certificates.
    pub(crate) fn expiries(&self) -> Vec<(&'static str, SystemTime)> {
        self.now().expires.clone()
    }

    /// Returns whether a connection has shown a credential that shows no identity any more.
    pub(crate) fn has_lost(&self, kept: &Kept) -> bool {
        let known = self.now();
        let mut credentials = kept.iter().filter_map(|kept| kept.downcast_ref::<Credential>());
        credentials.any(|credential| known.identities.find(credential).is_none())
    }

    /// Returns a future that takes up changes until it is dropped. On SIGHUP it takes up a change at once.
    ///
    /// # Errors
    /// If the signal cannot be caught.
    pub(crate) fn watch(self: &Arc<Self>) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        let mut hang_up = signal(SignalKind::hangup())?;
        let register = Arc::clone(self);
        Ok(async move {
            loop {
                let at_once = tokio::select! {
                    _ = hang_up.recv() => true,
                    () = tokio::time::sleep(LOOK) => false,
                };
                let register = Arc::clone(&register);
                // The files may be on a network drive, so a blocking thread reads them.
                let _ = tokio::task::spawn_blocking(move || register.look(at_once)).await;
            }
        })
    }

    fn look(&self, at_once: bool) {
        let found = contents(&self.dir);
        let mut seen = lock(&self.seen);
        if found == self.now().contents {
            *seen = None;
            return;
        }
        let before = seen.take().filter(|seen| seen.contents == found);
        // Two equal reads may still be refused for a passing reason, as a lack of descriptors: each look tries again.
        let due = at_once || before.is_some();
        let is_news = at_once || !before.is_some_and(|seen| seen.refused);
        let refused = due && !self.take_up(found.clone(), is_news);
        *seen = Some(Seen { contents: found, refused });
    }

    /// Takes up the contents. Returns false if the contents are unusable and the old contents stay. `is_news` says that
    /// the log has not named these contents yet.
    fn take_up(&self, found: Contents, is_news: bool) -> bool {
        match read(&self.dir, found) {
            Ok(known) => {
                *lock(&self.now) = Arc::new(known);
                self.changes.send_replace(());
                tracing::info!(dir = %self.dir.display(), "the TLS folder has changed and was taken up");
                true
            }
            Err(fault) => {
                if is_news {
                    tracing::warn!(%fault, "the TLS folder has changed and cannot be used: it stays as it was before");
                }
                false
            }
        }
    }
}

impl Owners for Register {
    fn quota(&self, owner: &str) -> Quota {
        self.now().identities.named(owner).map(|identity| identity.quota).unwrap_or_default()
    }

    fn list(&self) -> Vec<Listed> {
        let listed = |name: &str, quota| {
            let connections = self.presences.of(name);
            Listed { name: name.to_string(), quota, connections }
        };
        self.now().identities.all().iter().map(|of| listed(&of.name, of.quota)).collect()
    }
}

fn contents(dir: &Path) -> Contents {
    FILES.iter().map(|name| fs::read(dir.join(name)).ok()).collect()
}

fn read(dir: &Path, contents: Contents) -> Result<Known, Fault> {
    let path = dir.join(IDENTITIES);
    let text = fs::read_to_string(&path).map_err(|error| {
        let value = format!("{}, {error}", path.display());
        let remedy = "write it as docs/secure.md describes it, or make the folder with `longshore tls init`";
        Fault::new(FaultKind::Precondition, "tls_dir", value, "a readable file", remedy)
    })?;
    let identities = Identities::parse(&text)?;
    let certificates = if identities.has_tokens() { Certificates::Optional } else { Certificates::Required };
    let (tls, pages) = (tls::Server::read(dir, certificates)?, tls::Pages::read(dir)?);
    let expiry = |file| Some((file, tls::first_expiry(dir, file)?));
    let expires = [CA, SERVER_CERTIFICATE].into_iter().filter_map(expiry).collect();
    Ok(Known { contents, identities, tls, pages, expires })
}

/// Number of connections of each identity. A connection that has shown several identities, by tokens, counts for each
/// of them.
#[derive(Default)]
pub(super) struct Presences(Mutex<BTreeMap<String, u64>>);

/// Guard of an identity on one connection, stored with the connection.
struct Presence {
    among: Arc<Presences>,
    name: String,
}

impl Presences {
    fn of(&self, name: &str) -> u64 {
        lock(&self.0).get(name).copied().unwrap_or_default()
    }

    /// Counts the connection once for this identity.
    pub(super) fn admit(
        self: &Arc<Self>,
        connection: &Connection,
        name: &str,
        quota: &Quota,
    ) -> Result<(), Fault> {
        // The lock on `kept` is held throughout, so that two calls on one connection count the connection once.
        let mut kept = connection.kept();
        let here = |presence: &Presence| presence.name == name;
        if kept.iter().filter_map(|kept| kept.downcast_ref()).any(here) {
            return Ok(());
        }
        let mut counts = lock(&self.0);
        let count = counts.get(name).copied().unwrap_or_default();
        let most = connection.account.most_connections().map(|most| most as u64);
        Quota { connections: quota.connections.or(most), ..*quota }.admit_connection(name, count)?;
        counts.insert(name.to_string(), count + 1);
        connection.account.belongs_to(Owner::Identity(name.to_string()));
        kept.push(Box::new(Presence { among: Arc::clone(self), name: name.to_string() }));
        Ok(())
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let mut counts = lock(&self.among.0);
        if let Some(count) = counts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use longshore_wire::direct::{Bounds, Direct};
    use tokio::net::UnixStream;
    use tonic::transport::server::Connected;

    use super::*;

    /// Writes a server's folder with these identities.
    pub(in crate::trust) fn write(dir: &Path, identities: &str) {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_string()]).unwrap();
        let certificate = tls::certificate_pem(made.cert.der());
        let key = tls::key_pem(made.signing_key.serialized_der());
        let files = [&certificate, &certificate, &key, identities];
        FILES.iter().zip(files).for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
    }

    #[test]
    fn files_that_were_refused_for_a_passing_reason_are_taken_up() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        write(dir, "");
        let register = Register::open(dir).unwrap();
        write(dir, "no TOML");
        (0..3).for_each(|_| register.look(false));
        assert!(register.is_unusable());
        write(dir, "");
        // The first look at these files had no descriptor left for the second read.
        let seen = Seen { contents: contents(dir), refused: true };
        *register.seen.lock().unwrap() = Some(seen);
        register.look(false);
        assert_eq!((register.is_unusable(), &register.now().contents), (false, &contents(dir)));
    }

    #[tokio::test]
    async fn an_identity_without_a_quota_has_the_share_of_one_owner() {
        let (bounds, presences) = (Arc::new(Bounds::default()), Arc::<Presences>::default());
        bounds.allow(2);
        let connect = || {
            let (socket, other) = UnixStream::pair().unwrap();
            let (direct, standing) = Direct::serve(socket, &bounds, None);
            (direct.connect_info(), direct, standing, other)
        };
        let mut connections: Vec<_> = (0..3).map(|_| connect()).collect();
        let admit = |connection: &Connection, quota: &Quota| presences.admit(connection, "team", quota);
        let none = Quota::default();
        for (connection, ..) in &connections[..2] {
            assert_eq!((admit(connection, &none), admit(connection, &none)), (Ok(()), Ok(())));
        }
        let third = connections.pop().unwrap();
        assert_eq!(admit(&third.0, &none).unwrap_err().field, "quota.connections");
        assert_eq!(presences.admit(&third.0, "operator", &none), Ok(()), "each identity has its own");
        assert_eq!(admit(&third.0, &Quota { connections: Some(3), ..none }), Ok(()));
        assert_eq!(presences.of("team"), 3);
        drop((third, connections));
        assert_eq!(presences.of("team"), 0);
    }
}
