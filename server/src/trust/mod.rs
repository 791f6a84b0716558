//! Who a caller is, and what that identity may do: checked for every call, also on a connection that is open already.
//!
//! With a TLS folder a caller on TCP has shown a certificate, or shows a token. Its name is looked up for each call in the
//! identities as they are now, so that one which was taken from the file is refused at once. Whoever is admitted
//! to the Unix socket may do everything, as this server's user may; so may everybody where nothing is encrypted.

mod audit;
mod caller;
mod calls;
mod guard;
mod handshakes;
mod identities;
mod presence;
mod readers;
mod register;
mod unencrypted;

pub(crate) use self::{
    audit::note_refused_message, caller::Caller, guard::Guard, guard::Trust, handshakes::Handshakes,
    readers::Readers, register::Register,
};
