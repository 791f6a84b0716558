//! The codec of generated calls: protobuf. Before a message is decoded, its memory is reserved, and unknown fields are
//! refused.
//!
//! An empty element of a list takes 2 bytes on the wire and up to 120 decoded, so 16 MiB become a GiB. [`weigh`] counts
//! the elements without decoding. The call's [`Scope`] reserves them until the call is answered.

use std::{
    any::TypeId,
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
    known::Request,
    status, v1,
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
        // A scope is a server's. tonic gives each message as one piece.
        let admitted = SCOPE.try_with(|scope| {
            scope.reserve(weigh::<U>(bytes.chunk()))?;
            scope.request.map_or(Ok(()), |request| request.check(bytes.chunk()))
        });
        admitted.unwrap_or(Ok(())).map_err(|fault| status(&fault))?;
        self.0.decode(bytes)
    }
}

tokio::task_local! {
    static SCOPE: Arc<Scope>;
}

/// Memory of a call's decoded message, and its known fields.
pub struct Scope {
    account: Arc<Account>,
    request: Option<Request>,
    held: Mutex<Option<Held>>,
}

impl Scope {
    /// Returns the scope of a call to `path`.
    pub fn new(account: Arc<Account>, path: &str) -> Arc<Scope> {
        Arc::new(Scope { account, request: Request::at(path), held: Mutex::default() })
    }

    /// Runs a call, whose messages are reserved in this scope. A later message of a stream takes the place of the last.
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

/// Memory of the elements of a message's lists, by field number.
struct Shape(&'static [(u32, List)]);

enum List {
    /// Messages or strings: bytes of each beside its contents, and the lists inside.
    Each(usize, &'static Shape),
    /// Numbers of so many bytes, one after the other without tags.
    Packed(usize),
}

use List::{Each, Packed};

// Vectors grow by doubling, so elements count twice. Allocations of a name or a shape take 32 bytes and more.
const PLAIN: Shape = Shape(&[]);
const STRING: List = Each(80, &PLAIN);
const HYPER: List = Each(144, &PLAIN);
const LEFT_OUT: List = Each(48, &PLAIN);
const PARAM: List = Each(176, &Shape(&[(2, Packed(16))]));
const PARTITION: List = Each(112, &Shape(&[(2, Packed(8))]));
const SPEC: List = Each(0, &Shape(&[(2, PARAM), (3, STRING), (16, PARTITION)]));
const PLACEMENT: List = Each(0, &Shape(&[(2, STRING), (3, Packed(8))]));
const LOOK_AHEAD: List = Each(0, &Shape(&[(1, Packed(16))]));
const COMMIT: List = Each(0, &Shape(&[(6, HYPER), (13, LOOK_AHEAD), (16, LEFT_OUT)]));
const OPEN_JOB: Shape = Shape(&[(1, SPEC), (2, PLACEMENT)]);
const COMMIT_STEP: Shape = Shape(&[(3, COMMIT)]);
const SEAL: Shape = Shape(&[(3, STRING)]);
const UPLOAD: Shape = Shape(&[(8, LEFT_OUT)]);
const PULL: Shape = Shape(&[(5, Each(48, &PLAIN))]);

/// Returns the most memory of the message once decoded.
pub fn weigh<M: 'static>(message: &[u8]) -> usize {
    let of = |id: TypeId| id == TypeId::of::<M>();
    let shape = if of(TypeId::of::<v1::OpenJobRequest>()) {
        &OPEN_JOB
    } else if of(TypeId::of::<v1::CommitRequest>()) {
        &COMMIT_STEP
    } else if of(TypeId::of::<v1::SealCheckpointRequest>()) {
        &SEAL
    } else if of(TypeId::of::<v1::UploadRequest>()) {
        &UPLOAD
    } else if of(TypeId::of::<v1::PullRequest>()) {
        &PULL
    } else {
        &PLAIN
    };
    message.len() + weigh_as(shape, message)
}

/// Returns the memory of the elements alone. A damaged message weighs what comes before the damage: no more of it is
/// decoded.
fn weigh_as(Shape(lists): &Shape, mut message: &[u8]) -> usize {
    let mut weight = 0;
    while let Some(tag) = varint(&mut message) {
        let list = lists.iter().find(|(field, _)| u64::from(*field) == tag >> 3).map(|(_, list)| list);
        let skip = match tag & 7 {
            0 => {
                let Some(_) = varint(&mut message) else { break };
                0
            }
            1 => 8,
            5 => 4,
            2 => {
                let Some(len) = varint(&mut message) else { break };
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                let inside = &message[..len.min(message.len())];
                weight += match list {
                    Some(Each(bytes, shape)) => bytes + weigh_as(shape, inside),
                    // A number takes at least a byte on the wire.
                    Some(Packed(bytes)) => bytes * inside.len(),
                    None => 0,
                };
                len
            }
            _ => break,
        };
        // Numbers may come one by one, with a tag each.
        if let (Some(Packed(bytes)), 0 | 1 | 5) = (list, tag & 7) {
            weight += bytes;
        }
        message = &message[skip.min(message.len())..];
    }
    weight
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    prost::encoding::decode_varint(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        direct::{Bounds, Owner},
        v1::*,
    };

    /// Memory of a decoded message's lists, as allocated.
    fn memory(open: &OpenJobRequest) -> usize {
        let vector = |capacity: usize, each: usize| capacity * each;
        let (spec, placement) =
            (open.spec.clone().unwrap_or_default(), open.placement.clone().unwrap_or_default());
        let params: usize = spec.params.iter().map(|param| param.name.len() + 8 * param.shape.len()).sum();
        let ranks: usize = spec.partitions.iter().map(|partition| 4 * partition.ranks.len()).sum();
        let groups: usize = spec.groups.iter().map(String::len).sum();
        params
            + ranks
            + groups
            + vector(spec.params.len().next_power_of_two(), size_of::<Param>())
            + vector(spec.partitions.len().next_power_of_two(), size_of::<Partition>())
            + vector(spec.groups.len().next_power_of_two(), size_of::<String>())
            + vector(placement.servers.len().next_power_of_two(), size_of::<String>())
            + vector(placement.owners.len().next_power_of_two(), 4)
    }

    #[test]
    fn a_message_weighs_at_least_what_it_takes() {
        let param = |name: usize| Param { name: "x".repeat(name), shape: vec![1; name % 9], group: 0 };
        for (params, others) in [(1000, 0), (0, 3000), (777, 777)] {
            let spec = JobSpec {
                params: (0..params).map(|at| param(at % 40)).collect(),
                groups: vec![String::new(); others],
                partitions: vec![Partition { ranks: vec![1; 5], ..Default::default() }; others],
                ..Default::default()
            };
            let placement =
                Placement { servers: vec![String::new(); others], owners: vec![0; 5 * others], epoch: 0 };
            let open = OpenJobRequest { spec: Some(spec), placement: Some(placement), ..Default::default() };
            let bytes = open.encode_to_vec();
            assert!(weigh::<OpenJobRequest>(&bytes) >= memory(&open), "{params} {others}");
            assert!(weigh::<OpenJobRequest>(&bytes) < 20 * memory(&open));
        }
        let seal = SealCheckpointRequest { parts: vec![String::new(); 5000], ..Default::default() };
        assert!(weigh::<SealCheckpointRequest>(&seal.encode_to_vec()) > 5000 * size_of::<String>());
        let commit = Commit { groups: vec![Hyper::default(); 5000], ..Default::default() };
        let commit = CommitRequest { commit: Some(commit), ..Default::default() };
        assert!(weigh::<CommitRequest>(&commit.encode_to_vec()) > 5000 * size_of::<Hyper>());
        let pull = PullRequest { slices: vec![Slice::default(); 5000], ..Default::default() };
        assert!(weigh::<PullRequest>(&pull.encode_to_vec()) > 5000 * size_of::<Slice>());
        // Numbers with a tag each, as older encoders write them.
        let loose: Vec<u8> = [0x18, 1].repeat(1000);
        let loose = [&[0x12, 0xD0, 0x0F][..], &loose].concat();
        assert!(weigh::<OpenJobRequest>(&loose) > 4 * 1000);
    }

    #[test]
    fn noise_weighs_something() {
        for noise in [&[0xFF; 40][..], &[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F], &[0x0B, 1], &[0x0A]] {
            assert!(weigh::<OpenJobRequest>(noise) >= noise.len());
        }
    }

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
