//! A Unix socket for workers on the same host. A step through it takes half the CPU time of loopback TCP, and other
//! hosts reach no port.

use std::{
    env,
    fs::{self, DirBuilder},
    hash::{BuildHasher, RandomState},
    io,
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process,
    time::SystemTime,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use crate::{accept::Accept, connections::Origin, log::Seldom, members::Members};

/// Connections that may wait to be accepted, as when all ranks of a host start at the same moment.
const BACKLOG: i32 = 1024;

/// A socket file, removed on drop.
pub(crate) struct SocketFile {
    path: PathBuf,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the socket file was gone already");
        }
    }
}

/// A new folder for a socket, which only this user may enter. The folder is removed on drop.
pub(crate) struct SocketFolder(PathBuf);

/// Longest path of a folder for sockets. Linux takes 107 bytes for the path of a socket.
const LONGEST_FOLDER: usize = 90;

impl SocketFolder {
    /// Makes a folder below TMPDIR, or below /tmp if that path is unfit for an address. The error names the parent
    /// folder.
    pub(crate) fn make() -> Result<SocketFolder, (PathBuf, io::Error)> {
        SocketFolder::below(&env::temp_dir())
    }

    fn below(parent: &Path) -> Result<SocketFolder, (PathBuf, io::Error)> {
        // The path becomes part of an address: commas separate addresses of a list, and a URL has no spaces.
        let fits = |path: &str| {
            path.starts_with('/')
                && path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte))
        };
        let fit = parent.to_str().is_some_and(|path| path.len() + 28 <= LONGEST_FOLDER && fits(path));
        let parent = if fit { parent } else { Path::new("/tmp") };
        // The folder must be new, since other users may make files of any name here. The process and the time are
        // part of the number: forks of one process draw the same random numbers.
        let number = RandomState::new().hash_one((process::id(), SystemTime::now()));
        let path = parent.join(format!("longshore-{number:016x}"));
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map(|()| SocketFolder(path)).map_err(|source| (parent.into(), source))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("server.sock")
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "the folder of the socket stays");
        }
    }
}

/// A listener that accepts only permitted users.
pub(crate) struct Local {
    listener: tokio::net::UnixListener,
    members: Members,
    strangers: Seldom,
}

impl Accept for Local {
    type Socket = tokio::net::UnixStream;

    async fn accept(&mut self) -> io::Result<(tokio::net::UnixStream, Origin)> {
        loop {
            let (socket, _) = self.listener.accept().await?;
            let peer = socket.peer_cred()?;
            let (user, group) = (peer.uid(), peer.gid());
            if self.members.admit(user, group) {
                return Ok((socket, Origin::Local(user)));
            }
            // Rate-limited, since strangers could fill the log.
            self.strangers.say(|| {
                let (who, why) = (format!("user {user}, group {group}"), "neither the server's user nor of --unix-group");
                tracing::info!(target: "audit", who, call = "a connection to the Unix socket", outcome = "refused", why);
            });
        }
    }
}

/// Binds a socket that only `members` may connect to. A stale file of a killed server is replaced. A live socket, or
/// a file that is no socket, is refused.
pub(crate) fn listen_on(path: &Path, members: Members) -> io::Result<(Local, SocketFile)> {
    remove_stale(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    let file = SocketFile { path: path.to_path_buf() };
    // Owner and mode are set before `listen`, so the socket is never open to all.
    if let Some(group) = members.group()
        // `chown` is skipped if the group is right already: a service may lack permission to change owners.
        && fs::symlink_metadata(path)?.gid() != group
    {
        let why = |error| {
            format!("it cannot be given to group {group} ({error}): run the server as one of that group")
        };
        chown(path, None, Some(group)).map_err(|error| io::Error::new(error.kind(), why(error)))?;
    }
    let mode = if members.group().is_some() { 0o660 } else { 0o600 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    listen(&socket, BACKLOG)?;
    let listener = tokio::net::UnixListener::from_std(UnixListener::from(socket))?;
    Ok((Local { listener, members, strangers: Seldom::default() }, file))
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file there is no socket"));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another server answers there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "replacing the socket of a server that is gone");
            fs::remove_file(path)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("longshored.sock");
        // A closed listener leaves its file behind.
        drop(UnixListener::bind(&path).unwrap());
        let members = Members::of(None).unwrap();
        let (_listener, file) = listen_on(&path, members).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let error = listen_on(&path, members).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(UnixStream::connect(&path).is_ok());
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_for_a_socket_is_its_users_alone_and_goes_with_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let spaces = dir.path().join("a, b");
        for (parent, below) in [
            (dir.path(), dir.path()),
            (spaces.as_path(), Path::new("/tmp")),
            (Path::new("relative"), Path::new("/tmp")),
        ] {
            let folder = SocketFolder::below(parent).unwrap();
            let path = folder.0.clone();
            assert_eq!(path.parent(), Some(below));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
            drop(folder);
            assert!(!path.exists());
        }
        let missing = dir.path().join("missing");
        assert_eq!(SocketFolder::below(&missing).err().unwrap().0, missing);
    }

    #[tokio::test]
    async fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes.txt");
        fs::write(&path, "keep me").unwrap();
        let members = Members::of(None).unwrap();
        assert_eq!(listen_on(&path, members).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "keep me");
    }
}
