//! Authentication and authorization of callers: checked for every call, even on an open connection.
//!
//! With a TLS folder a caller on TCP shows a certificate or a token. Its name is looked up in the current identities at
//! each call, so a removed identity is refused at once. Users admitted to the Unix socket may do everything, like this
//! server's user. This user and root may do everything over loopback too, and with `--insecure` everyone may.

mod audit;
mod caller;
mod calls;
mod guard;
mod handshakes;
mod identities;
mod readers;
mod register;

pub(crate) use self::{
    audit::note_refused_message, caller::Caller, guard::Guard, guard::Trust, handshakes::Handshakes,
    readers::Readers, register::Register,
};
