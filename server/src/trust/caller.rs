//! Identity of a caller, and its permission checks.

use std::sync::{Arc, Mutex};

use http::Extensions;
use longshore_proto::{Fault, FaultKind, JobName};
use longshore_wire::direct::Connection;

use super::{
    calls::{Call, OPERATE, Scope, TEND},
    identities::{Credential, Identities, Identity, Role},
    register::Register,
};

use crate::lock::lock;

/// Caller of one call. A clone is cheap, and refers to the same call.
#[derive(Clone)]
pub(crate) struct Caller(Arc<Calling>);

struct Calling {
    who: Who,
    call: &'static Call,
    asked: Mutex<Asked>,
}

/// Messages of a call so far.
#[derive(Default)]
struct Asked {
    /// Job of the last message.
    job: Option<String>,
    /// The call was once permitted on the job, so it may have taken effect.
    permitted: bool,
    /// A refused message is already in the audit log.
    noted: bool,
}

/// Kind of caller.
#[derive(Clone)]
pub(super) enum Who {
    /// Everyone, since nothing is encrypted.
    Anybody,
    /// This server's user, or a user admitted to the Unix socket.
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

    /// Returns the caller of a call.
    ///
    /// # Errors
    /// If no [`super::Guard`] has identified the caller, which is a defect.
    pub(crate) fn of(extensions: &Extensions) -> Result<Caller, Fault> {
        extensions.get::<Caller>().cloned().ok_or_else(|| {
            let remedy = "see the server's log; this is a defect";
            Fault::new(FaultKind::Internal, "caller", "nobody", "found out before the call", remedy)
        })
    }

    /// Checks, with the current identities, that the call may be made on this job.
    pub(crate) fn permit(&self, job: &JobName) -> Result<(), Fault> {
        let job = job.as_str();
        let mut asked = lock(&self.0.asked);
        if asked.job.as_deref() != Some(job) {
            (asked.job, asked.permitted) = (Some(job.to_string()), false);
        }
        // The job's name is set before the check, so that a concurrent revocation sees it.
        let checked = self.check(Some(job));
        asked.permitted |= checked.is_ok();
        checked
    }

    /// Checks the caller for a job whose name is invalid. The audit record does not keep such a name.
    pub(crate) fn may_name(&self, job: &str) -> Result<(), Fault> {
        self.check(Some(job))
    }

    /// Returns whether the call was permitted on its job once, so that it may have taken effect.
    pub(super) fn was_permitted(&self) -> bool {
        lock(&self.0.asked).permitted
    }

    /// Returns true the first time, so that one refused message of a stream is logged.
    pub(super) fn is_first_refusal(&self) -> bool {
        !std::mem::replace(&mut lock(&self.0.asked).noted, true)
    }

    /// Returns whether the caller may learn that the job exists.
    pub(crate) fn sees(&self, job: &str) -> bool {
        self.check(Some(job)).is_ok()
    }

    /// Returns whether the caller's identity trains the job, so that its connections are a rank's. False for a caller
    /// without an identity.
    pub(crate) fn trains(&self, job: &str) -> bool {
        let Who::Listed { register, credential } = &self.0.who else { return false };
        let known = register.now();
        let identity = known.identities.find(credential);
        identity.is_some_and(|identity| identity.has_one_of(&[Role::Worker]) && identity.has_job(job))
    }

    /// Returns whether the caller may be a rank of the job. True for every caller without an identity.
    pub(crate) fn may_train(&self, job: &str) -> bool {
        !self.is_listed() || self.trains(job)
    }

    /// Checks that the caller may read optimizer state, beside the weights that every reader may read.
    pub(crate) fn permit_state(&self) -> Result<(), Fault> {
        self.permit_for(TEND, "Export with state")
    }

    /// Checks that the caller may ask for other servers. A rank needs no such permission to name servers as lost.
    pub(crate) fn permit_wish(&self) -> Result<(), Fault> {
        self.permit_for(OPERATE, "Scale with servers")
    }

    /// Checks a further right of the call, before the call has an effect. A refused call then counts as not permitted.
    fn permit_for(&self, roles: &[Role], call: &str) -> Result<(), Fault> {
        let Who::Listed { register, credential } = &self.0.who else { return Ok(()) };
        let known = register.now();
        let identity =
            known.identities.find(credential).ok_or_else(|| unlisted(&known.identities, credential));
        let checked = identity.and_then(|identity| check_role(identity, roles, call));
        checked.inspect_err(|_| lock(&self.0.asked).permitted = false)
    }

    /// Returns the owner of jobs that the caller opens. None without identities.
    pub(crate) fn owner(&self) -> Option<String> {
        let Who::Listed { register, credential } = &self.0.who else { return None };
        register.now().identities.find(credential).map(|identity| identity.name.clone())
    }

    pub(crate) fn sees_owner(&self, owner: &str) -> bool {
        let Who::Listed { register, credential } = &self.0.who else { return true };
        let known = register.now();
        known.identities.find(credential).is_some_and(|of| of.name == owner || of.has_all_jobs())
    }

    /// Counts the connection for the caller's identity.
    ///
    /// # Errors
    /// If the identity has reached its quota of connections, and this connection is not counted yet.
    ///
    /// The connection keeps the credential, and ends once the credential shows no identity any more.
    pub(super) fn be_present(&self, connection: Option<&Connection>) -> Result<(), Fault> {
        let (Who::Listed { register, credential }, Some(connection)) = (&self.0.who, connection) else {
            return Ok(());
        };
        let known = register.now();
        let Some(identity) = known.identities.find(credential) else { return Ok(()) };
        register.presences.admit(connection, &identity.name, &identity.quota)?;
        let mut kept = connection.kept();
        if !kept.iter().any(|kept| kept.downcast_ref::<Credential>() == Some(credential)) {
            kept.push(Box::new(credential.clone()));
        }
        Ok(())
    }

    /// Checks the caller's role, and the job if known. No job is known before the first message.
    pub(super) fn check(&self, job: Option<&str>) -> Result<(), Fault> {
        let Who::Listed { register, credential } = &self.0.who else { return Ok(()) };
        let (known, call) = (register.now(), self.0.call);
        let identity =
            known.identities.find(credential).ok_or_else(|| unlisted(&known.identities, credential))?;
        check_role(identity, call.roles, call.name())?;
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

    /// Resolves once the permitted call is no longer permitted.
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

    /// Returns the job of the call, once its message has come.
    pub(super) fn job(&self) -> Option<String> {
        lock(&self.0.asked).job.clone()
    }

    pub(super) fn is_audited(&self) -> bool {
        self.0.call.audited
    }

    pub(crate) fn call(&self) -> &'static str {
        self.0.call.name()
    }

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

    /// Returns whether the caller is a listed identity, whose permission may be revoked during the call.
    pub(super) fn is_listed(&self) -> bool {
        matches!(self.0.who, Who::Listed { .. })
    }
}

fn shown(credential: &Credential) -> String {
    match credential {
        Credential::Certificate(certificate) => format!("a certificate with the name {:?}", certificate.name),
        Credential::Token(_) => "a token".into(),
    }
}

fn check_role(identity: &Identity, roles: &[Role], call: &str) -> Result<(), Fault> {
    if identity.has_one_of(roles) {
        return Ok(());
    }
    let [roles, has] = [roles, identity.roles.as_slice()]
        .map(|roles| roles.iter().map(ToString::to_string).collect::<Vec<_>>());
    let value = format!("{}, which is {}", identity.name, has.join(" and "));
    Err(forbidden(value, format!("{} for {call}", roles.join(" or "))))
}

fn unlisted(identities: &Identities, credential: &Credential) -> Fault {
    let (why, remedy) = match identities.is_revoked(credential) {
        true => ("that was revoked", "ask an operator of the server for another"),
        false => (
            "that this server does not know",
            "ask an operator of the server to list it, with its roles and jobs",
        ),
    };
    let value = format!("{} {why}", shown(credential));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::register::tests::write;

    #[test]
    fn a_call_without_a_further_right_had_no_effect() {
        let folder = tempfile::tempdir().unwrap();
        let Credential::Token(hash) = Credential::of_token(b"abc") else { unreachable!() };
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let worker = "[[identity]]\nname = \"a\"\nroles = [\"worker\"]\njobs = [\"*\"]\n";
        write(folder.path(), &format!("{worker}tokens_sha256 = [\"{hash}\"]"));
        let register = Register::open(folder.path()).unwrap();
        let who = Who::Listed { register, credential: Credential::of_token(b"abc") };
        let caller = Caller::new(who, Call::at("/longshore.v1.Admin/Scale").unwrap());
        caller.permit(&JobName::parse("job", "run").unwrap()).unwrap();
        assert!(caller.was_permitted(), "a rank may say that servers are lost");
        assert_eq!(caller.permit_wish().unwrap_err().kind, FaultKind::Forbidden);
        assert!(!caller.was_permitted());
    }
}
