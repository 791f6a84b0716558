//! Requests before they are decoded: their memory, and fields that this server does not know.
//!
//! An empty element of a list takes 2 bytes on the wire and up to 120 decoded. So 16 MiB become a GiB. Decoding drops
//! unknown fields, so a newer client's request would be taken for another request.

use std::{collections::BTreeMap, sync::LazyLock};

use longshore_proto::{Fault, limits::PROTOCOL};
use prost::{
    Message as _,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

use crate::FILE_DESCRIPTOR_SET;

/// Depth of messages within messages, as deep as prost decodes.
const MOST_DEPTH: usize = 100;
/// Least memory of the allocation of a name or a list of numbers.
const ALLOCATION_BYTES: usize = 32;

static KNOWN: LazyLock<Known> = LazyLock::new(|| Known::of(FILE_DESCRIPTOR_SET));

/// The message of a call's requests.
#[derive(Clone, Copy)]
pub(crate) struct Request(usize);

struct Known {
    messages: Vec<Message>,
    /// Index of each call's request message, keyed by the call's path.
    requests: BTreeMap<String, usize>,
}

struct Message {
    name: String,
    /// Fields, indexed by number. None is an unknown field.
    fields: Vec<Option<Field>>,
}

#[derive(Clone, Copy)]
struct Field {
    /// Index of the field's message type. None for a field of another type.
    inside: Option<usize>,
    /// Memory of an element beside its contents, if the field is a list.
    each: usize,
    /// Elements are numbers, which may follow each other without tags.
    packed: bool,
}

/// Result of a walk over a message. The walk ends at damage: prost decodes nothing behind it, and refuses the message.
#[derive(Default)]
struct Seen {
    /// Memory of lists.
    lists: usize,
    /// First unknown field: its message and number.
    unknown: Option<(usize, u32)>,
}

impl Known {
    /// Without a readable descriptor set nothing is known, and nothing checked.
    fn of(descriptors: &[u8]) -> Known {
        let files = FileDescriptorSet::decode(descriptors).unwrap_or_default().file;
        let package = files.first().map(|file| file.package().to_string()).unwrap_or_default();
        let all: Vec<&DescriptorProto> = files.iter().flat_map(|file| &file.message_type).collect();
        let place = |of: &str| {
            let name = of.strip_prefix(&format!(".{package}."))?;
            all.iter().position(|message| message.name() == name)
        };
        let messages = all.iter().map(|message| {
            let mut fields = Vec::new();
            for field in &message.field {
                let number = field.number() as usize;
                fields.resize(fields.len().max(number + 1), None);
                let inside = place(field.type_name());
                let is_list = field.label() == Label::Repeated;
                let each = if is_list { element_bytes(field, inside.map(|inside| all[inside])) } else { 0 };
                let is_number = !matches!(field.r#type(), Type::Message | Type::String | Type::Bytes);
                fields[number] = Some(Field { inside, each, packed: is_list && is_number });
            }
            Message { name: message.name().to_string(), fields }
        });
        let mut requests = BTreeMap::new();
        for service in files.iter().flat_map(|file| &file.service) {
            for method in &service.method {
                let path = format!("/{package}.{}/{}", service.name(), method.name());
                requests.extend(place(method.input_type()).map(|message| (path, message)));
            }
        }
        Known { messages: messages.collect(), requests }
    }

    fn walk(&self, message: usize, mut bytes: &[u8], depth: usize, seen: &mut Seen) -> Option<()> {
        while let Ok((number, wire_type)) = decode_key(&mut bytes) {
            let field = self.messages.get(message)?.fields.get(number as usize).copied().flatten();
            let Some(Field { inside, each, packed }) = field else {
                seen.unknown.get_or_insert((message, number));
                skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
                continue;
            };
            if wire_type != WireType::LengthDelimited {
                seen.lists += each;
                skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
                continue;
            }
            let len = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
            let within = &bytes[..len.min(bytes.len())];
            // A number takes at least a byte on the wire.
            seen.lists += if packed { each * within.len() } else { each };
            if let Some(inside) = inside.filter(|_| depth < MOST_DEPTH) {
                self.walk(inside, within, depth + 1, seen);
            }
            bytes = bytes.get(len..)?;
        }
        Some(())
    }
}

/// Returns the memory of a list's element. Vectors grow by doubling, so elements count twice.
fn element_bytes(list: &FieldDescriptorProto, message: Option<&DescriptorProto>) -> usize {
    let (own, allocations) = match (list.r#type(), message) {
        (_, Some(message)) => {
            let own = message.field.iter().map(own_bytes);
            (own.clone().map(|own| own.max(8)).sum(), own.filter(|own| *own > 8).count())
        }
        (Type::String | Type::Bytes, None) => (value_bytes(list), 1),
        (_, None) => (value_bytes(list), 0),
    };
    2 * own + ALLOCATION_BYTES * allocations
}

/// Returns the memory of a field in its message's struct.
fn own_bytes(field: &FieldDescriptorProto) -> usize {
    if field.label() == Label::Repeated { size_of::<Vec<u8>>() } else { value_bytes(field) }
}

fn value_bytes(field: &FieldDescriptorProto) -> usize {
    match field.r#type() {
        Type::Message | Type::Bytes => size_of::<bytes::Bytes>(),
        Type::String => size_of::<String>(),
        Type::Double | Type::Int64 | Type::Uint64 | Type::Fixed64 | Type::Sfixed64 | Type::Sint64 => 8,
        _ => 4,
    }
}

impl Request {
    /// Returns the request of a call. None for calls of other packages.
    pub(crate) fn at(path: &str) -> Option<Request> {
        KNOWN.requests.get(path).copied().map(Request)
    }

    /// Returns the largest memory that the message can take once decoded.
    ///
    /// # Errors
    /// If it has a field that this server does not know.
    pub(crate) fn examine(self, bytes: &[u8]) -> (usize, Result<(), Fault>) {
        let mut seen = Seen::default();
        KNOWN.walk(self.0, bytes, 0, &mut seen);
        let Seen { lists, unknown } = seen;
        let refused = |(message, number): (usize, u32)| {
            let value = format!("sent with field {number}");
            let limit = format!("of the fields of protocol {PROTOCOL}, this server's");
            let remedy = "start the client's version of longshored here, before the client";
            Err(Fault::invalid(KNOWN.messages[message].name.as_str(), value, limit, remedy))
        };
        (bytes.len() + lists, unknown.map_or(Ok(()), refused))
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::FaultKind;

    use super::*;
    use crate::v1::*;

    const OPEN: &str = "/longshore.v1.Training/OpenJob";

    fn weigh(path: &str, message: &[u8]) -> usize {
        Request::at(path).unwrap().examine(message).0
    }

    fn open() -> OpenJobRequest {
        let spec = JobSpec {
            name: "run".into(),
            params: vec![Param { name: "w".into(), shape: vec![3, 5], group: 1 }; 2],
            groups: vec!["all".into()],
            partitions: vec![Partition { first: 1, ranks: vec![0, 300], frozen: true }],
            leave_out: true,
            rounding_seed: u64::MAX,
            ..Default::default()
        };
        let (servers, owners) = (vec!["here".into()], vec![0, 1]);
        let placement = Placement { epoch: 1, servers, owners, ..Default::default() };
        let (spec, placement) = (Some(spec), Some(placement));
        OpenJobRequest { spec, placement, server: 1, protocol: PROTOCOL, ..Default::default() }
    }

    /// Returns message field `outer` with the contents `inner`, encoded as protobuf does.
    fn within(outer: u8, inner: &[u8]) -> Vec<u8> {
        [&[outer << 3 | 2, inner.len() as u8][..], inner].concat()
    }

    fn refused(path: &str, bytes: &[u8]) -> Option<(String, String)> {
        let fault = Request::at(path).unwrap().examine(bytes).1.err()?;
        assert_eq!(fault.kind, FaultKind::Invalid);
        Some((fault.field, fault.value))
    }

    #[test]
    fn fields_that_the_server_does_not_know_are_refused_by_message_and_number() {
        let known = open().encode_to_vec();
        assert_eq!(refused(OPEN, &known), None);
        let found = |bytes: &[u8]| refused(OPEN, &[&known, bytes].concat());
        let named = |message: &str, number: u32| Some((message.into(), format!("sent with field {number}")));
        // Field 9 as a number, as bytes, and as a group.
        assert_eq!(found(&[9 << 3, 1]), named("OpenJobRequest", 9));
        assert_eq!(found(&within(9, b"new")), named("OpenJobRequest", 9));
        assert_eq!(found(&[9 << 3 | 3, 9 << 3 | 4]), named("OpenJobRequest", 9));
        assert_eq!(found(&within(1, &[0xF8, 0x06, 1])), named("JobSpec", 111));
        assert_eq!(found(&within(1, &within(2, &within(7, b"")))), named("Param", 7));
        assert_eq!(found(&within(2, &[9 << 3, 1])), named("Placement", 9));
        let groups = vec![Hyper { lr: 1.0, ..Default::default() }; 3];
        let commit = Commit { step: 1, groups, trainer_state: vec![1; 300].into(), ..Default::default() };
        let commit = CommitRequest { commit: Some(commit), origin: 7, ..Default::default() }.encode_to_vec();
        let commit_path = "/longshore.v1.Training/Commit";
        assert_eq!(refused(commit_path, &commit), None);
        let other = [commit, within(3, &within(6, &[15 << 3 | 5, 0, 0, 0, 0]))].concat();
        assert_eq!(refused(commit_path, &other), named("Hyper", 15));
        // Damaged messages are prost's to refuse.
        for damaged in [&[0x0A, 0x7F][..], &[0x0A, 0xFF], &[0x0B], &[0xFF; 20], &[0]] {
            assert_eq!(found(damaged), None, "{damaged:?}");
        }
    }

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
            let placement = Placement {
                servers: vec![String::new(); others],
                owners: vec![0; 5 * others],
                ..Default::default()
            };
            let open = OpenJobRequest { spec: Some(spec), placement: Some(placement), ..Default::default() };
            let bytes = open.encode_to_vec();
            assert!(weigh(OPEN, &bytes) >= memory(&open), "{params} {others}");
            assert!(weigh(OPEN, &bytes) < 20 * memory(&open));
        }
        let seal = SealCheckpointRequest { parts: vec![String::new(); 5000], ..Default::default() };
        assert!(
            weigh("/longshore.v1.Admin/SealCheckpoint", &seal.encode_to_vec()) > 5000 * size_of::<String>()
        );
        let commit = Commit { groups: vec![Hyper::default(); 5000], ..Default::default() };
        let commit = CommitRequest { commit: Some(commit), ..Default::default() };
        assert!(weigh("/longshore.v1.Training/Commit", &commit.encode_to_vec()) > 5000 * size_of::<Hyper>());
        let pull = PullRequest { slices: vec![Slice::default(); 5000], ..Default::default() };
        assert!(weigh("/longshore.v1.Tensors/Pull", &pull.encode_to_vec()) > 5000 * size_of::<Slice>());
        // Numbers with a tag each, as older encoders write them.
        let loose: Vec<u8> = [0x18, 1].repeat(1000);
        let loose = [&[0x12, 0xD0, 0x0F][..], &loose].concat();
        assert!(weigh(OPEN, &loose) > 4 * 1000);
    }

    #[test]
    fn noise_weighs_something() {
        for noise in [&[0xFF; 40][..], &[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F], &[0x0B, 1], &[0x0A]] {
            assert!(weigh(OPEN, noise) >= noise.len());
        }
    }
}
