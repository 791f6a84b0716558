//! The author of a checkpoint's calls, named in the metadata of each call. Two authors may write checkpoints of one
//! name. The name keeps a discard by one author from removing the other author's part.

use longshore_proto::Incarnation;
use tonic::{
    Request,
    metadata::{Ascii, MetadataMap, MetadataValue},
};

const KEY: &str = "longshore-author";

/// The author of Checkpoint, SealCheckpoint and DiscardCheckpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Author {
    /// A client that names no author.
    Unknown,
    /// A command of an operator. Its random number tells it apart from other commands.
    Operator(u64),
    /// Rank 0's process. Its calls are refused once a newer process has fenced it.
    Rank(Incarnation),
}

impl Author {
    pub fn sign<T>(self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let value = match self {
            Author::Unknown => return request,
            Author::Operator(number) => format!("operator {number}"),
            Author::Rank(incarnation) => format!("rank {}", incarnation.0),
        };
        if let Ok(value) = value.parse::<MetadataValue<Ascii>>() {
            request.metadata_mut().insert(KEY, value);
        }
        request
    }

    pub fn of(metadata: &MetadataMap) -> Author {
        let value = metadata.get(KEY).and_then(|value| value.to_str().ok()).unwrap_or_default();
        match value.split_once(' ').and_then(|(kind, number)| Some((kind, number.parse().ok()?))) {
            Some(("operator", number)) => Author::Operator(number),
            Some(("rank", number)) => Author::Rank(Incarnation(number)),
            _ => Author::Unknown,
        }
    }
}
