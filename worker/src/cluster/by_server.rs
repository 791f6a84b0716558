//! Values found by a server's number: `ByServer` holds the servers' answers to one call, `Met` a session's state for
//! each server.

use std::{
    ops::{Index, IndexMut},
    sync::OnceLock,
};

use longshore_proto::{ServerId, limits::MAX_SERVERS};

/// Values of several servers, one each, in the order of the servers' numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByServer<T>(Vec<(ServerId, T)>);

impl<T> ByServer<T> {
    /// Makes the value of each server.
    pub(crate) fn new(
        servers: impl IntoIterator<Item = ServerId>,
        mut make: impl FnMut(ServerId) -> T,
    ) -> ByServer<T> {
        servers.into_iter().map(|server| (server, make(server))).collect()
    }

    /// Every server that has a value.
    pub(crate) fn ids(&self) -> impl ExactSizeIterator<Item = ServerId> {
        self.0.iter().map(|(server, _)| *server)
    }

    pub(crate) fn values(&self) -> impl ExactSizeIterator<Item = &T> {
        self.0.iter().map(|(_, value)| value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ServerId, &T)> {
        self.0.iter().map(|(server, value)| (*server, value))
    }

    pub(crate) fn map<U>(self, mut change: impl FnMut(T) -> U) -> ByServer<U> {
        self.0.into_iter().map(|(server, value)| (server, change(value))).collect()
    }

    /// First server whose value satisfies `is_so`.
    pub(crate) fn find(&self, is_so: impl Fn(&T) -> bool) -> Option<ServerId> {
        self.iter().find(|(_, value)| is_so(value)).map(|(server, _)| server)
    }

    pub(crate) fn get(&self, server: ServerId) -> Option<&T> {
        let at = self.0.binary_search_by_key(&server, |(server, _)| *server).ok()?;
        Some(&self.0[at].1)
    }

    pub(crate) fn into_vec(self) -> Vec<T> {
        self.0.into_iter().map(|(_, value)| value).collect()
    }
}

impl<T> Index<ServerId> for ByServer<T> {
    type Output = T;

    fn index(&self, server: ServerId) -> &T {
        self.get(server).expect("a value for each server that was asked")
    }
}

impl<T> IndexMut<ServerId> for ByServer<T> {
    fn index_mut(&mut self, server: ServerId) -> &mut T {
        let value = self.0.iter_mut().find(|(known, _)| *known == server);
        &mut value.expect("a value for each server that was asked").1
    }
}

/// Servers come in the order of their numbers.
impl<T> FromIterator<(ServerId, T)> for ByServer<T> {
    fn from_iter<I: IntoIterator<Item = (ServerId, T)>>(values: I) -> ByServer<T> {
        ByServer(values.into_iter().collect())
    }
}

impl<T> IntoIterator for ByServer<T> {
    type Item = (ServerId, T);
    type IntoIter = std::vec::IntoIter<(ServerId, T)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// A value for each server that a session has connected with. Servers join while others are in use. No value is
/// replaced or removed before the session ends, so readers need no lock.
pub(crate) struct Met<T>(Vec<OnceLock<Box<T>>>);

impl<T> Default for Met<T> {
    fn default() -> Met<T> {
        Met((0..MAX_SERVERS).map(|_| OnceLock::new()).collect())
    }
}

impl<T> Met<T> {
    /// Returns a server's value, made by the first call.
    pub(crate) fn get_or_make(&self, server: ServerId, make: impl FnOnce() -> T) -> &T {
        self.0[server.0 as usize].get_or_init(|| Box::new(make()))
    }

    pub(crate) fn get(&self, server: ServerId) -> Option<&T> {
        self.0.get(server.0 as usize)?.get().map(|value| &**value)
    }
}

impl<T> Index<ServerId> for Met<T> {
    type Output = T;

    fn index(&self, server: ServerId) -> &T {
        self.get(server).expect("a server that the session has met")
    }
}
