//! Who makes a call, and whether that identity may.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::Extensions;
use longshore_proto::{Fault, FaultKind};
use longshore_wire::direct::Connection;

use super::{
    calls::{Call, Scope},
    identities::{Credential, Identity, Role},
    register::Register,
};

/// Whoever makes one call. A clone is cheap, and of the same call.
#[derive(Clone)]
pub(crate) struct Caller(Arc<Calling>);

struct Calling {
    who: Who,
    call: &'static Call,
    asked: Mutex<Asked>,
}

/// What a call has asked for so far.
#[derive(Default)]
struct Asked {
    /// The job of its last message.
    job: Option<String>,
    /// It was permitted on that job once, so that something may have been done.
    permitted: bool,
    /// That a message was refused stands on the record.
    noted: bool,
}

/// Who may call.
#[derive(Clone)]
pub(super) enum Who {
    /// Everybody, since nothing is encrypted.
    Anybody,
    /// This server's user, or whom it admits to its Unix socket.
    User,
    Listed {
        register: Arc<Register>,
        credential: Credential,
    },
}

impl Caller {
    pub(super) fn new(who: Who, call: &'static Call) -> Caller {
        Caller(Arc::new(Calling { who, call, asked: Mutex::default() }))
    }

    /// That of a call.
    ///
    /// # Errors
    /// Where nobody has found out who calls, which is a defect.
    pub(crate) fn of(extensions: &Extensions) -> Result<Caller, Fault> {
        extensions.get::<Caller>().cloned().ok_or_else(|| {
            let remedy = "see the server's log; this is a defect";
            Fault::new(FaultKind::Internal, "caller", "nobody", "found out before the call", remedy)
        })
    }

    /// Checks, with the identities as they are now, that the call may be made on this job.
    pub(crate) fn permit(&self, job: &str) -> Result<(), Fault> {
        let mut asked = self.asked();
        if asked.job.as_deref() != Some(job) {
            (asked.job, asked.permitted) = (Some(job.to_string()), false);
        }
        // Whoever takes the job away meanwhile finds its name here by then.
        let checked = self.check(Some(job));
        asked.permitted |= checked.is_ok();
        checked
    }

    /// Whether the call was permitted on its job once, so that something of it may have been done.
    pub(super) fn was_permitted(&self) -> bool {
        self.asked().permitted
    }

    /// Returns true the first time that it is called.
    pub(super) fn is_first_refusal(&self) -> bool {
        !std::mem::replace(&mut self.asked().noted, true)
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.0.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller is told that there is such a job.
    pub(crate) fn sees(&self, job: &str) -> bool {
        self.check(Some(job)).is_ok()
    }

    /// Whether the caller's identity trains the job, so that its connections are a rank's. Nobody knows that of a caller without an identity.
    pub(crate) fn trains(&self, job: &str) -> bool {
        let Who::Listed { register, credential } = &self.0.who else { return false };
        let known = register.now();
        let identity = known.identities.find(credential);
        identity.is_some_and(|identity| identity.has_one_of(&[Role::Worker]) && identity.has_job(job))
    }

    /// Who owns what the caller makes; None where callers show no identity.
    pub(crate) fn owner(&self) -> Option<String> {
        let Who::Listed { register, credential } = &self.0.who else { return None };
        register.now().identities.find(credential).map(|identity| identity.name.clone())
    }

    /// Whether the caller is told what this identity has here.
    pub(crate) fn sees_owner(&self, owner: &str) -> bool {
        let Who::Listed { register, credential } = &self.0.who else { return true };
        let known = register.now();
        known.identities.find(credential).is_some_and(|of| of.name == owner || of.has_all_jobs())
    }

    /// Counts the connection among those of the caller's identity.
    ///
    /// # Errors
    /// Where the identity has as many as it may have, and this one is not among them.
    pub(super) fn be_present(&self, connection: Option<&Connection>) -> Result<(), Fault> {
        let (Who::Listed { register, credential }, Some(connection)) = (&self.0.who, connection) else {
            return Ok(());
        };
        let known = register.now();
        let Some(identity) = known.identities.find(credential) else { return Ok(()) };
        register.presences.admit(connection, &identity.name, &identity.quota)
    }

    /// Checks the caller's role, and the job where the call is about one: before a message has come there is none.
    pub(super) fn check(&self, job: Option<&str>) -> Result<(), Fault> {
        let Who::Listed { register, credential } = &self.0.who else { return Ok(()) };
        let (known, call) = (register.now(), self.0.call);
        let identity = known.identities.find(credential).ok_or_else(|| unlisted(credential))?;
        if !identity.has_one_of(call.roles) {
            let roles: Vec<String> = call.roles.iter().map(ToString::to_string).collect();
            let has: Vec<String> = identity.roles.iter().map(ToString::to_string).collect();
            let value = format!("{}, which is {}", identity.name, has.join(" and "));
            return Err(forbidden(value, format!("{} for {}", roles.join(" or "), call.name())));
        }
        if call.scope == Scope::AllJobs && !identity.has_all_jobs() {
            return Err(forbidden(jobs_of(identity), format!("one with all jobs (*) for {}", call.name())));
        }
        match job {
            Some(job) if !identity.has_job(job) => {
                Err(forbidden(jobs_of(identity), format!("one that has the job {job:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Ends once the call, which was permitted, is so no longer.
    pub(super) async fn revoked(&self) -> Fault {
        let Who::Listed { register, .. } = &self.0.who else { return std::future::pending().await };
        let mut changes = register.changes();
        loop {
            let job = self.job();
            if let Err(fault) = self.check(job.as_deref()) {
                return fault;
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// The job that the call is about, once its message has come.
    pub(super) fn job(&self) -> Option<String> {
        self.asked().job.clone()
    }

    pub(super) fn is_audited(&self) -> bool {
        self.0.call.audited
    }

    pub(super) fn call(&self) -> &'static str {
        self.0.call.name()
    }

    /// Who it is, in words.
    pub(super) fn who(&self) -> String {
        match &self.0.who {
            Who::Anybody => "anybody: nothing is encrypted".into(),
            Who::User => "the user of this host".into(),
            Who::Listed { register, credential } => match register.now().identities.find(credential) {
                Some(identity) => identity.name.clone(),
                None => shown(credential),
            },
        }
    }

    /// Whether it may be taken away while the call is under way.
    pub(super) fn is_listed(&self) -> bool {
        matches!(self.0.who, Who::Listed { .. })
    }
}

fn shown(credential: &Credential) -> String {
    match credential {
        Credential::Certificate(name) => format!("a certificate with the name {name:?}"),
        Credential::Token(_) => "a token".into(),
    }
}

fn unlisted(credential: &Credential) -> Fault {
    let value = format!("{} that this server does not know", shown(credential));
    let remedy = "ask an operator of the server to list it, with its roles and jobs";
    Fault::new(FaultKind::Unauthenticated, "identity", value, "one that identities.toml lists", remedy)
}

fn jobs_of(identity: &Identity) -> String {
    format!("{}, with the jobs {}", identity.name, identity.jobs())
}

fn forbidden(value: String, limit: String) -> Fault {
    let remedy =
        "show another identity, or ask an operator of the server to give this one more in identities.toml";
    Fault::new(FaultKind::Forbidden, "identity", value, limit, remedy)
}
