//! The codec of generated calls: protobuf. Before a message is decoded, [`Request`] examines it, and the call's
//! [`Scope`] reserves its memory until the call is answered.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Buf;
use longshore_proto::{
    fault::{Fault, FaultKind},
    limits::{SHARE_BYTES, SMALL_MESSAGE_BYTES},
};
use prost::Message;
use tonic::{
    Status,
    codec::{Codec as TonicCodec, DecodeBuf, Decoder},
};
use tonic_prost::{ProstDecoder, ProstEncoder};

use crate::{
    direct::{Account, Held},
    request::Request,
    status,
};

/// The codec that generated code names.
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Codec(PhantomData)
    }
}

impl<T, U> TonicCodec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Weighing<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Weighing(ProstDecoder::default())
    }
}

/// Decodes messages whose memory was reserved.
pub struct Weighing<U>(ProstDecoder<U>);

impl<U: Message + Default + 'static> Decoder for Weighing<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // Only a server's calls run in a scope; a client's messages are decoded without a reservation. tonic gives
        // each message as one piece, so `chunk` returns all of it.
        let admitted = SCOPE.try_with(|scope| {
            let message = bytes.chunk();
            let examined = scope.request.map(|request| request.examine(message));
            let (memory, known) = examined.unwrap_or((message.len(), Ok(())));
            scope.reserve(memory)?;
            known
        });
        admitted.unwrap_or(Ok(())).map_err(|fault| status(&fault))?;
        self.0.decode(bytes)
    }
}

tokio::task_local! {
    static SCOPE: Arc<Scope>;
}

/// Reservation for a call's decoded message, and the fields that this message may have.
pub struct Scope {
    account: Arc<Account>,
    request: Option<Request>,
    held: Mutex<Option<Held>>,
}

impl Scope {
    pub fn new(account: Arc<Account>, path: &str) -> Arc<Scope> {
        Arc::new(Scope { account, request: Request::at(path), held: Mutex::default() })
    }

    /// Runs a call, whose messages are reserved in this scope. A stream's next message replaces the reservation of the
    /// message before.
    pub async fn run<F: Future>(self: Arc<Scope>, call: F) -> F::Output {
        SCOPE.scope(self, call).await
    }

    fn reserve(&self, bytes: usize) -> Result<(), Fault> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        *held = None;
        if bytes > SMALL_MESSAGE_BYTES {
            *held = Some(self.account.hold(bytes).ok_or_else(|| no_room("request", bytes))?);
        }
        Ok(())
    }
}

/// Returns the fault of a message, or of an answer, for which there is no room now, or never.
pub fn no_room(field: &str, bytes: usize) -> Fault {
    if bytes > SHARE_BYTES {
        let (value, limit) = (format!("{bytes} bytes in memory"), format!("at most {SHARE_BYTES}"));
        return Fault::new(FaultKind::Exhausted, field, value, limit, "send fewer elements in a message");
    }
    let value = format!("{bytes} bytes, among others that are not whole or that their readers do not take");
    let limit = format!("within {SHARE_BYTES} bytes of this caller and the room of all");
    Fault::new(FaultKind::Unavailable, field, value, limit, "try again when they have come")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direct::{Bounds, Owner};

    #[test]
    fn a_scope_holds_one_message() {
        let account = Bounds::default().account(Owner::Local);
        let scope = Scope::new(Arc::clone(&account), "");
        assert_eq!(scope.reserve(SHARE_BYTES + 1).unwrap_err().kind, FaultKind::Exhausted);
        scope.reserve(SHARE_BYTES).unwrap();
        assert!(account.hold(1).is_none());
        scope.reserve(SHARE_BYTES).unwrap();
        let others = account.hold(1);
        assert!(others.is_none());
        scope.reserve(SMALL_MESSAGE_BYTES).unwrap();
        let all = account.hold(SHARE_BYTES).unwrap();
        assert_eq!(scope.reserve(SMALL_MESSAGE_BYTES + 1).unwrap_err().kind, FaultKind::Unavailable);
        drop((scope, all));
    }
}
