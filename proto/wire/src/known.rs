//! Fields of requests that this server does not know. prost drops such fields, so a newer client's request would be
//! taken for another one.

use std::{collections::BTreeMap, sync::LazyLock};

use longshore_proto::{Fault, limits::PROTOCOL};
use prost::{
    Message as _,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use prost_types::FileDescriptorSet;

use crate::FILE_DESCRIPTOR_SET;

/// Depth of messages within messages, as deep as prost decodes.
const MOST_DEPTH: usize = 100;

static KNOWN: LazyLock<Known> = LazyLock::new(|| Known::of(FILE_DESCRIPTOR_SET));

/// A request's message, as an index into the table.
#[derive(Clone, Copy)]
pub(crate) struct Request(usize);

struct Known {
    messages: Vec<Fields>,
    /// Messages of requests, by path.
    requests: BTreeMap<String, usize>,
}

/// A message's name, and its fields by number. A field's value is the index of the message in it.
#[derive(Default)]
struct Fields(String, BTreeMap<u32, Option<usize>>);

impl Known {
    /// Without a readable descriptor set nothing is known, and nothing checked.
    fn of(descriptors: &[u8]) -> Known {
        let files = FileDescriptorSet::decode(descriptors).unwrap_or_default().file;
        let package = files.first().map(|file| file.package().to_string()).unwrap_or_default();
        let all: Vec<_> = files.iter().flat_map(|file| &file.message_type).collect();
        let full = |name: &str| format!(".{package}.{name}");
        let place = |of: &str| all.iter().position(|message| full(message.name()) == of);
        let messages = all.iter().map(|message| {
            let fields = message.field.iter().map(|field| (field.number() as u32, place(field.type_name())));
            Fields(message.name().to_string(), fields.collect())
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

    /// Returns the first unknown field: its message's name, and its number. A damaged message is left to prost.
    fn unknown(&self, message: usize, mut bytes: &[u8], depth: usize) -> Option<(&str, u32)> {
        let Fields(name, fields) = self.messages.get(message)?;
        while let Ok((number, wire_type)) = decode_key(&mut bytes) {
            let Some(inside) = fields.get(&number) else { return Some((name, number)) };
            if let (WireType::LengthDelimited, Some(inside)) = (wire_type, inside) {
                let len = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
                let (within, rest) = bytes.split_at_checked(len)?;
                let found = (depth < MOST_DEPTH).then(|| self.unknown(*inside, within, depth + 1));
                if let Some(Some(found)) = found {
                    return Some(found);
                }
                bytes = rest;
            } else {
                skip_field(wire_type, number, &mut bytes, DecodeContext::default()).ok()?;
            }
        }
        None
    }
}

impl Request {
    /// Returns the request of a call. None for calls of other packages.
    pub(crate) fn at(path: &str) -> Option<Request> {
        KNOWN.requests.get(path).copied().map(Request)
    }

    /// Refuses a message with a field that this server does not know.
    pub(crate) fn check(self, bytes: &[u8]) -> Result<(), Fault> {
        let Some((message, number)) = KNOWN.unknown(self.0, bytes, 0) else { return Ok(()) };
        let value = format!("sent with field {number}");
        let limit = format!("of the fields of protocol {PROTOCOL}, this server's");
        let remedy = "start the client's version of longshored here, before the client";
        Err(Fault::invalid(message, value, limit, remedy))
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::FaultKind;

    use super::*;
    use crate::v1::*;

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
        let placement = Placement { epoch: 1, servers: vec!["here".into()], owners: vec![0, 1] };
        OpenJobRequest { spec: Some(spec), placement: Some(placement), server: 1, protocol: PROTOCOL }
    }

    /// A field of this number within a message field of another number.
    fn within(outer: u8, inner: &[u8]) -> Vec<u8> {
        [&[outer << 3 | 2, inner.len() as u8][..], inner].concat()
    }

    fn refused(path: &str, bytes: &[u8]) -> Option<(String, String)> {
        let fault = Request::at(path).unwrap().check(bytes).err()?;
        assert_eq!(fault.kind, FaultKind::Invalid);
        Some((fault.field, fault.value))
    }

    #[test]
    fn fields_that_the_server_does_not_know_are_refused_by_message_and_number() {
        let open_job = "/longshore.v1.Training/OpenJob";
        let known = open().encode_to_vec();
        assert_eq!(refused(open_job, &known), None);
        let found = |bytes: &[u8]| refused(open_job, &[&known, bytes].concat());
        let named = |message: &str, number: u32| Some((message.into(), format!("sent with field {number}")));
        // Field 9 as a number, as bytes, and as a group.
        assert_eq!(found(&[9 << 3, 1]), named("OpenJobRequest", 9));
        assert_eq!(found(&within(9, b"new")), named("OpenJobRequest", 9));
        assert_eq!(found(&[9 << 3 | 3, 9 << 3 | 4]), named("OpenJobRequest", 9));
        assert_eq!(found(&within(1, &[0xF8, 0x06, 1])), named("JobSpec", 111));
        assert_eq!(found(&within(1, &within(2, &within(7, b"")))), named("Param", 7));
        assert_eq!(found(&within(2, &[4 << 3, 1])), named("Placement", 4));
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

    #[test]
    fn the_table_has_every_message_that_a_request_may_hold() {
        assert!(KNOWN.requests.len() > 20 && Request::at("/grpc.health.v1.Health/Check").is_none());
        let Fields(name, fields) = &KNOWN.messages[KNOWN.requests["/longshore.v1.Training/Commit"]];
        assert_eq!(name, "CommitRequest");
        assert!(fields[&3].is_some() && fields[&5].is_some() && fields[&1].is_none());
    }
}
