//! Event files as TensorBoard reads them: records with masked CRC-32C, each a protobuf `Event`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crc_fast::{CrcAlgorithm, checksum};
use longshore_worker::pipeline::StepOutcome;
use prost::Message;

/// What is written is on the disk at most this late.
const FLUSH: Duration = Duration::from_secs(2);
/// The name of the format, in the first event of each file.
const VERSION: &str = "brain.Event:2";

/// The fields of tensorflow/core/util/event.proto that scalars take.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// In seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// One file of events, which is written as training goes on.
pub(super) struct EventFile {
    out: BufWriter<File>,
    flushed: Instant,
}

impl EventFile {
    /// Makes a file with a new name in the folder, and the folder where it is absent.
    pub(super) fn create(dir: &Path) -> io::Result<EventFile> {
        fs::create_dir_all(dir)?;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "host" } else { host.trim() };
        let seconds = now() as u64;
        let name = |count: u32| {
            dir.join(format!("events.out.tfevents.{seconds}.{host}.{}.{count}", std::process::id()))
        };
        let mut count = 0;
        let file = loop {
            match File::create_new(name(count)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => count += 1,
                file => break file?,
            }
        };
        let mut events = EventFile { out: BufWriter::new(file), flushed: Instant::now() };
        events.write(&Event { wall_time: now(), file_version: Some(VERSION.into()), ..Event::default() })?;
        events.out.flush()?;
        Ok(events)
    }

    /// Writes scalars of one step. Those that are no numbers are left out.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> io::Result<()> {
        let value = |&(tag, value): &(&str, f64)| Value { tag: tag.into(), simple_value: Some(value as f32) };
        let value = scalars.iter().filter(|(_, value)| value.is_finite()).map(value).collect();
        let summary = Some(Summary { value });
        self.write(&Event { wall_time: now(), step: step as i64, summary, ..Event::default() })?;
        if self.flushed.elapsed() > FLUSH {
            self.out.flush()?;
            self.flushed = Instant::now();
        }
        Ok(())
    }

    /// Writes what a decided step is worth a curve of.
    pub(super) fn step(
        &mut self,
        outcome: &StepOutcome,
        loss: f32,
        rate: f64,
        tokens: u64,
    ) -> io::Result<()> {
        let wall = outcome.timing.wall.as_secs_f64();
        let scalars = [
            ("loss", loss.into()),
            // A skipped step has none.
            ("gradient_norm", if outcome.skip { f64::NAN } else { outcome.norm }),
            ("learning_rate", rate),
            ("loss_scale", outcome.loss_scale),
            ("step_ms", wall * 1e3),
            ("exposed_ms", outcome.timing.exposed.as_secs_f64() * 1e3),
            ("tokens_per_s", tokens as f64 / wall.max(1e-9)),
        ];
        self.scalars(outcome.step.0, &scalars)
    }

    /// Brings what was written to the file.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// A record: its length, the length's checksum, the bytes, their checksum.
    fn write(&mut self, event: &Event) -> io::Result<()> {
        let bytes = event.encode_to_vec();
        let length = (bytes.len() as u64).to_le_bytes();
        for part in [&length[..], &masked(&length), &bytes, &masked(&bytes)] {
            self.out.write_all(part)?;
        }
        Ok(())
    }
}

/// CRC-32C as records have it: turned and moved, since a checksum of bytes with checksums in them would be weak.
fn masked(bytes: &[u8]) -> [u8; 4] {
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    crc.rotate_right(15).wrapping_add(0xA282_EAD8).to_le_bytes()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_masked_as_tensorflow_has_them() {
        // CRC-32C of "123456789" is 0xE3069283, and of 32 zeros 0x8A9136AA (RFC 3720).
        for (bytes, crc) in [(&b"123456789"[..], 0xE306_9283_u32), (&[0; 32], 0x8A91_36AA)] {
            let expected = crc.rotate_right(15).wrapping_add(0xA282_EAD8);
            assert_eq!(u32::from_le_bytes(masked(bytes)), expected);
        }
    }

    #[test]
    fn two_files_of_a_second_have_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let (mut first, _second) =
            (EventFile::create(folder.path()).unwrap(), EventFile::create(folder.path()).unwrap());
        first.scalars(1, &[("loss", 2.0), ("norm", f64::NAN)]).unwrap();
        first.flush().unwrap();
        let lengths =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        let lengths: Vec<u64> = lengths.collect();
        assert!(lengths.len() == 2 && lengths[0] != lengths[1], "{lengths:?}");
    }
}
