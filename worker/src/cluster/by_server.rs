//! A list with one value for each server of a job, indexed by the server's id alone.

use std::ops::{Index, IndexMut};

use longshore_proto::ServerId;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByServer<T>(Vec<T>);

impl<T> ByServer<T> {
    /// Makes the value of each server.
    pub(crate) fn new(servers: usize, make: impl FnMut(ServerId) -> T) -> ByServer<T> {
        ids(servers).map(make).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Every server, in the placement's order.
    pub(crate) fn ids(&self) -> impl ExactSizeIterator<Item = ServerId> + use<T> {
        ids(self.0.len())
    }

    pub(crate) fn values(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ServerId, &T)> {
        self.ids().zip(&self.0)
    }

    pub(crate) fn map<U>(self, change: impl FnMut(T) -> U) -> ByServer<U> {
        self.0.into_iter().map(change).collect()
    }

    /// The first server for whose value `is_so` holds.
    pub(crate) fn find(&self, is_so: impl Fn(&T) -> bool) -> Option<ServerId> {
        self.iter().find(|(_, value)| is_so(value)).map(|(server, _)| server)
    }

    pub(crate) fn into_vec(self) -> Vec<T> {
        self.0
    }
}

fn ids(servers: usize) -> impl ExactSizeIterator<Item = ServerId> {
    (0..servers as u32).map(ServerId)
}

impl<T> Index<ServerId> for ByServer<T> {
    type Output = T;

    fn index(&self, server: ServerId) -> &T {
        &self.0[server.0 as usize]
    }
}

impl<T> IndexMut<ServerId> for ByServer<T> {
    fn index_mut(&mut self, server: ServerId) -> &mut T {
        &mut self.0[server.0 as usize]
    }
}

/// Values in the placement's order.
impl<T> FromIterator<T> for ByServer<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> ByServer<T> {
        ByServer(values.into_iter().collect())
    }
}

impl<T> IntoIterator for ByServer<T> {
    type Item = (ServerId, T);
    type IntoIter =
        std::iter::Zip<std::iter::Map<std::ops::Range<u32>, fn(u32) -> ServerId>, std::vec::IntoIter<T>>;

    fn into_iter(self) -> Self::IntoIter {
        let ids = (0..self.0.len() as u32).map(ServerId as fn(u32) -> ServerId);
        ids.zip(self.0)
    }
}
