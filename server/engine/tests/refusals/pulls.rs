//! Pulls that a server refuses, and the bytes of those that it answers.

use std::io::{Read, Seek};

use longshore_engine::{
    job::{ImageBytes, Pulled},
    memory::{Part, write_parts},
};
use longshore_proto::{Dtype, FaultKind, ShardId, Slice, Version, checksum::crc32};

use super::{BLOCK, Midway, check, commit};

use FaultKind::{Invalid, NotFound, Precondition};

#[test]
fn a_version_is_there_or_not_yet_or_gone() {
    let mut midway = Midway::new();
    let image = |midway: &Midway, version| midway.cluster.image(ShardId(0), version);
    assert!(image(&midway, 0).unwrap().is_some() && image(&midway, 1).unwrap().is_some());
    assert_eq!(image(&midway, 2), Ok(None), "step 2 is in flight");
    check(
        &image(&midway, 3).unwrap_err(),
        (Precondition, "version", &["is 3", "at most 2", "step in flight"]),
    );
    check(&image(&midway, u64::MAX).unwrap_err(), (Precondition, "version", &["at most 2"]));
    let flats = midway.second.clone();
    midway.cluster.step(&flats, &commit(&midway.cluster.spec, 2));
    let fault = image(&midway, 0).unwrap_err();
    check(&fault, (NotFound, "version", &["is 0", "one of those kept: 1 and 2", "join again"]));
    assert!(image(&midway, 1).unwrap().is_some() && image(&midway, 2).unwrap().is_some());
}

/// Returns an image's bytes as the kernel would send them.
fn sent(bytes: &ImageBytes) -> Vec<u8> {
    let ImageBytes::Here(bytes) = bytes else { panic!("the image is in memory") };
    let mut file = tempfile::tempfile().unwrap();
    assert_eq!(write_parts(&file, &[Part::Shared(bytes.clone())]).unwrap(), bytes.len());
    file.rewind().unwrap();
    let mut sent = Vec::new();
    file.read_to_end(&mut sent).unwrap();
    sent
}

#[test]
fn what_is_overwritten_while_it_is_sent_has_another_checksum() {
    let mut midway = Midway::new();
    for slice in [
        Slice { shard: ShardId(0), offset: 0, elements: 5 * BLOCK as u64 },
        Slice { shard: ShardId(0), offset: 11, elements: 1300 },
    ] {
        let job = &midway.cluster.jobs[0];
        assert!(job.lend_image(&slice, Version(2)).unwrap().is_none(), "step 2 is in flight");
        let first = job.lend_image(&slice, Version(1)).unwrap().unwrap();
        // The second pull uses the checksum that the first one computed.
        let again = job.lend_image(&slice, Version(1)).unwrap().unwrap();
        assert_eq!((crc32(&sent(&first.bytes)), first.crc32), (again.crc32, crc32(&sent(&again.bytes))));
        let copied = job.copy_image(&slice, Version(1)).unwrap().unwrap();
        assert_eq!((copied.bytes, copied.crc32), (sent(&first.bytes), first.crc32));
    }
    let slice = Slice { shard: ShardId(0), offset: 0, elements: 5 * BLOCK as u64 };
    let Pulled { bytes, crc32: sum, .. } =
        midway.cluster.jobs[0].lend_image(&slice, Version(0)).unwrap().unwrap();
    assert_eq!(crc32(&sent(&bytes)), sum);
    let flats = midway.second.clone();
    midway.cluster.step(&flats, &commit(&midway.cluster.spec, 2));
    assert_ne!(crc32(&sent(&bytes)), sum);
    let job = &midway.cluster.jobs[0];
    let fault = job.lend_image(&slice, Version(0)).err().unwrap();
    check(&fault, (NotFound, "version", &["is 0", "one of those kept: 1 and 2"]));
    let Pulled { bytes, crc32: sum, .. } = job.lend_image(&slice, Version(2)).unwrap().unwrap();
    assert_eq!(crc32(&sent(&bytes)), sum, "the checksum of the version before is forgotten");
    midway.finish();
}

#[test]
fn a_slice_lies_inside_its_shard() {
    let midway = Midway::new();
    let job = &midway.cluster.jobs[0];
    let whole = 5 * BLOCK as u64;
    let slice = |shard, offset, elements| Slice { shard: ShardId(shard), offset, elements };
    for bad in [
        slice(0, 0, whole + 1),
        slice(0, whole, 1),
        slice(0, 7, 0),
        slice(0, u64::MAX, 2),
        slice(2, 0, whole),
    ] {
        let fault = job.check_slice(&bad, Dtype::Bf16).unwrap_err();
        check(&fault, (Invalid, "slice", &["elements at", "inside the shard's", "cut the slice"]));
    }
    let fault = job.copy_image(&slice(1, 0, 1), Version(1)).err().unwrap();
    check(&fault, (Precondition, "shard", &["shard is 1", "server 1's", "placement"]));
    for foreign in [3, u32::MAX] {
        let fault = job.check_slice(&slice(foreign, 0, 1), Dtype::Bf16).unwrap_err();
        check(&fault, (NotFound, "shard", &["of 3 in the job"]));
        let fault = job.copy_image(&slice(foreign, 0, 1), Version(1)).err().unwrap();
        check(&fault, (NotFound, "shard", &["of 3 in the job"]));
    }
    for dtype in [Dtype::F32, Dtype::F16] {
        let fault = job.check_slice(&slice(0, 0, 1), dtype).unwrap_err();
        check(&fault, (Invalid, "dtype", &["bf16, as the job was opened"]));
        assert_eq!(fault.value, dtype.name());
    }
    job.check_slice(&slice(0, 11, 13), Dtype::Bf16).unwrap();
    let middle = job.copy_image(&slice(0, 11, 13), Version(1)).unwrap().unwrap();
    assert_eq!(middle.bytes, midway.cluster.image(ShardId(0), 1).unwrap().unwrap()[22..48]);
    midway.finish();
}
