//! Keeps for each server why it stopped taking gradients: later failures have this cause.

use std::sync::{Mutex, MutexGuard, PoisonError};

use longshore_proto::{Fault, FaultKind, ServerId};

use super::ByServer;

pub(crate) struct Troubles(Mutex<ByServer<Option<Fault>>>);

impl Troubles {
    pub(super) fn new(servers: usize) -> Troubles {
        Troubles(Mutex::new(ByServer::new(servers, |_| None)))
    }

    fn lock(&self) -> MutexGuard<'_, ByServer<Option<Fault>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a server does not take gradients, for example because it drains or is gone. Returns true the
    /// first time, until the server takes gradients again.
    pub(crate) fn note(&self, server: ServerId, fault: &Fault) -> bool {
        let trouble = &mut self.lock()[server];
        let first = trouble.is_none() && fault.kind == FaultKind::Unavailable;
        if first {
            *trouble = Some(fault.clone());
        }
        first
    }

    /// Notes that the server takes gradients again.
    pub(crate) fn clear(&self, server: ServerId) {
        self.lock()[server] = None;
    }

    /// Returns why a server does not take gradients.
    pub(crate) fn of(&self, server: ServerId) -> Option<Fault> {
        self.lock()[server].clone()
    }
}
