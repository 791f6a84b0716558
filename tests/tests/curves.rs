//! What a run leaves for people to look at: event files for TensorBoard, read back here by a parser of its own, and a plot.

use std::{collections::BTreeMap, fs, path::Path};

use longshore_tests::{command::run, train::Train};
use tempfile::TempDir;

/// CRC-32C bit by bit, as RFC 3720 has it.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

#[track_caller]
fn check(bytes: &[u8], masked: &[u8]) {
    let crc = crc32c(bytes);
    let expected = crc.rotate_right(15).wrapping_add(0xA282_EAD8);
    assert_eq!(u32::from_le_bytes(masked.try_into().unwrap()), expected);
}

/// The records of a file, each with its checksums checked.
fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    while !file.is_empty() {
        let (length, rest) = file.split_at(8);
        let (crc, rest) = rest.split_at(4);
        check(length, crc);
        let (record, rest) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        let (crc, rest) = rest.split_at(4);
        check(record, crc);
        records.push(record.to_vec());
        file = rest;
    }
    records
}

/// One field of a protobuf message.
#[derive(Debug)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (&byte, rest) = bytes.split_first().expect("a number goes on");
        *bytes = rest;
        value |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let mut take = |length: usize| {
            let (taken, rest) = bytes.split_at(length);
            bytes = rest;
            taken.to_vec()
        };
        let field = match key & 7 {
            1 => Field::Number(u64::from_le_bytes(take(8).try_into().unwrap())),
            5 => Field::Number(u32::from_le_bytes(take(4).try_into().unwrap()).into()),
            0 => Field::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (taken, rest) = bytes.split_at(length);
                bytes = rest;
                Field::Bytes(taken.to_vec())
            }
            kind => panic!("a field of kind {kind}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

/// Each scalar's values by step.
fn scalars(records: &[Vec<u8>]) -> BTreeMap<String, BTreeMap<u64, f32>> {
    let mut found: BTreeMap<String, BTreeMap<u64, f32>> = BTreeMap::new();
    for record in records {
        let event = fields(record);
        // A step of 0 is left out, as protobuf has it.
        let step = event.iter().find_map(|(tag, field)| match (tag, field) {
            (2, Field::Number(step)) => Some(*step),
            _ => None,
        });
        for (tag, field) in &event {
            let (5, Field::Bytes(summary)) = (tag, field) else { continue };
            for (_, value) in fields(summary) {
                let Field::Bytes(value) = value else { panic!("{value:?}") };
                let [(1, Field::Bytes(name)), (2, Field::Number(bits))] = &fields(&value)[..] else {
                    panic!("no scalar: {value:?}")
                };
                let name = String::from_utf8(name.clone()).unwrap();
                found.entry(name).or_default().insert(step.unwrap_or(0), f32::from_bits(*bits as u32));
            }
        }
    }
    found
}

fn only_file(dir: &Path) -> Vec<u8> {
    let files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert!(files[0].file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."), "{files:?}");
    fs::read(&files[0]).unwrap()
}

#[test]
fn tensorboard_reads_what_a_run_writes() {
    assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    let folder = TempDir::new().unwrap();
    let dir = folder.path().join("runs");
    let ended = Train::new(12).args(["--tensorboard", &dir.display().to_string()]).run();
    let records = records(&only_file(&dir));
    let version = fields(&records[0]).into_iter().find(|(tag, _)| *tag == 3);
    assert!(matches!(version, Some((_, Field::Bytes(text))) if text == b"brain.Event:2"));
    let scalars = scalars(&records);
    for name in
        ["loss", "gradient_norm", "learning_rate", "loss_scale", "step_ms", "exposed_ms", "tokens_per_s"]
    {
        let steps: Vec<u64> = scalars[name].keys().copied().collect();
        assert_eq!(steps, (1..=12).collect::<Vec<_>>(), "{name}");
    }
    let losses = &scalars["loss"];
    assert!(losses[&1] > losses[&12] && losses[&12] > 0.0, "{losses:?}");
    let validation = &scalars["validation_loss"];
    assert_eq!(validation.keys().copied().collect::<Vec<_>>(), [0, 12]);
    assert_eq!(validation[&12], ended.end.validation_loss);
}

#[test]
fn a_plot_is_printed_where_it_is_asked_for() {
    let plain = run("longshore train", &mut Train::new(8).command());
    assert!(!plain.stdout.contains("loss of each step"), "{plain:?}");
    let plotted = run("longshore train", Train::new(8).command().arg("--plot"));
    let lines: Vec<&str> = plotted.stdout.lines().skip_while(|line| *line != "loss of each step").collect();
    assert!(lines.len() > 14 && lines[1].contains("|*") && lines[14].ends_with("step 8"), "{lines:#?}");
}
