//! Readers of the HTTP address with TLS: identities that have all jobs, since its pages show all of them.

use std::{io, sync::Arc};

use base64::{Engine, prelude::BASE64_STANDARD};
use http::{HeaderMap, header::AUTHORIZATION};
use longshore_proto::{Fault, FaultKind};
use longshore_wire::{direct::Certificate, tls::Reader};
use tokio::net::TcpStream;

use super::{
    audit,
    caller::{Caller, Who},
    calls::PAGES,
    guard::bearer,
    identities::Credential,
    register::Register,
};
use crate::log::Seldom;

/// Identities that may read.
pub(crate) struct Readers {
    register: Arc<Register>,
    refused: Seldom,
}

impl Readers {
    pub(crate) fn new(register: Arc<Register>) -> Readers {
        Readers { register, refused: Seldom::default() }
    }

    /// Performs the handshake with the folder's current certificate, without a deadline.
    ///
    /// # Errors
    /// If the reader disconnects, does not speak TLS, or shows a certificate that is not accepted.
    pub(crate) async fn accept(&self, socket: TcpStream) -> io::Result<Reader> {
        self.register.now().pages.accept(socket).await
    }

    /// Admits a reader by its token or certificate.
    ///
    /// # Errors
    /// `Unauthenticated` without a listed identity, and `Forbidden` if the identity does not have all jobs.
    pub(crate) fn admit(
        &self,
        certificate: Option<&Arc<Certificate>>,
        headers: &HeaderMap,
    ) -> Result<(), Fault> {
        let admitted = credential(certificate, headers).and_then(|credential| {
            let who = Who::Listed { register: Arc::clone(&self.register), credential };
            let caller = Caller::new(who, &PAGES);
            caller.check(None).inspect_err(|fault| {
                if fault.kind == FaultKind::Forbidden {
                    self.refused.say(|| audit::refused(&caller, fault));
                }
            })
        });
        if let Err(fault) = admitted.as_ref()
            && fault.kind == FaultKind::Unauthenticated
        {
            self.refused
                .say(|| tracing::info!(target: "audit", call = "pages", %fault, "a stranger's request"));
        }
        admitted
    }
}

/// Returns the reader's credential: a token before a certificate, as in gRPC calls.
fn credential(certificate: Option<&Arc<Certificate>>, headers: &HeaderMap) -> Result<Credential, Fault> {
    let shown = match headers.get(AUTHORIZATION) {
        Some(value) => token(value.as_bytes()).map(|token| Credential::of_token(&token)),
        None => certificate.map(|certificate| Credential::Certificate(Arc::clone(certificate))),
    };
    shown.ok_or_else(|| {
        let remedy = "show a client's certificate of this cluster, or send a token as `authorization: Bearer ...` or as the password of any user";
        Fault::new(FaultKind::Unauthenticated, "identity", "not shown", "a certificate or a token", remedy)
    })
}

/// Returns the token of an Authorization header: a Bearer token, or the password of Basic from a browser.
fn token(value: &[u8]) -> Option<Vec<u8>> {
    if let Some(token) = bearer(value) {
        return Some(token.to_vec());
    }
    let (scheme, both) = value.split_at_checked(b"Basic ".len())?;
    let both =
        scheme.eq_ignore_ascii_case(b"Basic ").then(|| BASE64_STANDARD.decode(both.trim_ascii()).ok())??;
    let colon = both.iter().position(|&byte| byte == b':')?;
    Some(both[colon + 1..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_by_itself_or_as_a_password() {
        assert_eq!(token(b"bearer  abc ").as_deref(), Some(&b"abc"[..]));
        let basic = |text: &str| token(format!("basic {}", BASE64_STANDARD.encode(text)).as_bytes());
        assert_eq!(basic("me:a:b").as_deref(), Some(&b"a:b"[..]));
        assert_eq!(basic(":abc").as_deref(), Some(&b"abc"[..]));
        assert_eq!(basic("abc"), None);
        for other in [&b"Basic ???"[..], b"Digest abc", b"Bearer", b"Bearerabc", b""] {
            assert_eq!(token(other), None);
        }
    }
}
