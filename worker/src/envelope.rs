//! Encodes a commit's `trainer_state`: the loss scaler after that commit, the origins of its contributions, and the
//! trainer's own bytes. Rank 0's driver writes the bytes, and ranks that join read them. A restarted worker needs no
//! other record of its own.

use longshore_proto::{
    Fault, Origin,
    limits::{MAX_SERVERS, MAX_TRAINER_STATE_BYTES},
};

use crate::loss_scale::{LossScaler, LossScalerOptions};

/// Contents of `trainer_state`, little-endian. All other fields have known sizes, so the trainer's bytes come last and
/// need no length:
///
/// | bytes | what |
/// |---|---|
/// | 4 | magic `LSTS` |
/// | 1 | format version, 2; format 1 has no origins |
/// | 1 | flags: 2 dynamic, 4 consecutive hysteresis (1 is ignored: it told of a pause, which the commit now does) |
/// | 3 x 8 | f64 scale, initial, min |
/// | 8, 4, 4 | window, hysteresis, hysteresis left |
/// | 8, 8 | updates, last overflow (i64) |
/// | 8 | f64 loss scale of the version before, which a delayed step reads after a restart |
/// | 4, then 8 for each | servers, and the origin of the step's contributions on each of them |
/// | rest | the trainer's |
///
/// Magic and version come first: by them a foreign client's state is told from a damaged state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Envelope {
    pub(crate) scaler: LossScaler,
    pub(crate) previous_loss_scale: f64,
    /// Origin of each server's contributions, in the placement's order. If rank 0 dies before its decision reaches a
    /// server, the next rank 0 sends the decision with the origin. A server that holds other contributions then refuses
    /// the decision.
    pub(crate) origins: Vec<Origin>,
    pub(crate) trainer: Vec<u8>,
}

const MAGIC: [u8; 4] = *b"LSTS";
const FORMAT: u8 = 2;
const WITHOUT_ORIGINS: u8 = 1;
const HEADER_BYTES: usize = 4 + 1 + 1 + 3 * 8 + 8 + 4 + 4 + 8 + 8 + 8 + 4;
/// Bytes left for the trainer, for the largest number of servers.
pub(crate) const MAX_TRAINER_BYTES: usize =
    MAX_TRAINER_STATE_BYTES - HEADER_BYTES - MAX_SERVERS * size_of::<u64>();

const DYNAMIC: u8 = 2;
const CONSECUTIVE: u8 = 4;

impl Envelope {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let LossScaler { options, dynamic, scale, hysteresis_left, updates, last_overflow } = &self.scaler;
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(*dynamic, DYNAMIC) | flag(options.consecutive_hysteresis, CONSECUTIVE);
        let origins = self.origins.len() * size_of::<u64>();
        let mut bytes = Vec::with_capacity(HEADER_BYTES + origins + self.trainer.len());
        bytes.extend(MAGIC);
        bytes.extend([FORMAT, flags]);
        for value in [*scale, options.initial, options.min] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(options.window.to_le_bytes());
        bytes.extend(options.hysteresis.to_le_bytes());
        bytes.extend(hysteresis_left.to_le_bytes());
        bytes.extend(updates.to_le_bytes());
        bytes.extend(last_overflow.to_le_bytes());
        bytes.extend(self.previous_loss_scale.to_le_bytes());
        bytes.extend((self.origins.len() as u32).to_le_bytes());
        self.origins.iter().for_each(|origin| bytes.extend(origin.0.to_le_bytes()));
        bytes.extend(&self.trainer);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Envelope, Fault> {
        let mut reader = Reader(bytes);
        let read = Self::read(&mut reader).filter(|envelope| envelope.is_sound());
        read.ok_or_else(|| {
            let head: Vec<String> = bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
            let value = format!("{} bytes, starting with {}", bytes.len(), head.join(" "));
            let limit = format!("a resume state of format {WITHOUT_ORIGINS} or {FORMAT}");
            let remedy =
                "resume with the program and version that trained the job, or restore another checkpoint";
            Fault::invalid("commit.trainer_state", value, limit, remedy)
        })
    }

    fn read(reader: &mut Reader<'_>) -> Option<Envelope> {
        let magic: [u8; 4] = reader.take()?;
        let [format, flags]: [u8; 2] = reader.take()?;
        if magic != MAGIC || ![WITHOUT_ORIGINS, FORMAT].contains(&format) {
            return None;
        }
        let [scale, initial, min] = [reader.f64()?, reader.f64()?, reader.f64()?];
        let window = u64::from_le_bytes(reader.take()?);
        let hysteresis = u32::from_le_bytes(reader.take()?);
        let hysteresis_left = u32::from_le_bytes(reader.take()?);
        let updates = u64::from_le_bytes(reader.take()?);
        let last_overflow = i64::from_le_bytes(reader.take()?);
        let previous_loss_scale = reader.f64()?;
        let servers = if format == FORMAT { u32::from_le_bytes(reader.take()?) as usize } else { 0 };
        let origins = (0..servers.min(MAX_SERVERS + 1))
            .map(|_| reader.take().map(|origin| Origin(u64::from_le_bytes(origin))));
        let origins = origins.collect::<Option<Vec<Origin>>>()?;
        let consecutive_hysteresis = flags & CONSECUTIVE != 0;
        let options = LossScalerOptions { initial, window, hysteresis, consecutive_hysteresis, min };
        let dynamic = flags & DYNAMIC != 0;
        let scaler = LossScaler { options, dynamic, scale, hysteresis_left, updates, last_overflow };
        Some(Envelope { scaler, previous_loss_scale, origins, trainer: reader.0.to_vec() })
    }

    /// Returns true if a scaler can have these values. Other values would divide by zero, or overflow its counts.
    fn is_sound(&self) -> bool {
        let LossScaler { options, scale, hysteresis_left, updates, last_overflow, .. } = &self.scaler;
        let numbers = [*scale, options.initial, options.min, self.previous_loss_scale];
        numbers.iter().all(|value| value.is_finite() && *value > 0.0)
            && options.window > 0
            && *hysteresis_left > 0
            && *hysteresis_left <= options.hysteresis
            && i64::try_from(*updates).is_ok_and(|updates| (-1..updates).contains(last_overflow))
            && self.origins.len() <= MAX_SERVERS
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn f64(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope() -> Envelope {
        let mut scaler = LossScaler::dynamic(LossScalerOptions { window: 7, ..Default::default() }).unwrap();
        scaler.update(true);
        scaler.update(true);
        let origins = vec![Origin(7), Origin::UNKNOWN];
        Envelope { scaler, previous_loss_scale: 4.0, origins, trainer: b"epoch 3".to_vec() }
    }

    #[test]
    fn all_state_survives() {
        let bytes = envelope().encode();
        assert_eq!(bytes.len(), HEADER_BYTES + 2 * 8 + 7);
        assert_eq!(Envelope::decode(&bytes), Ok(envelope()));
    }

    #[test]
    fn a_state_without_origins_is_read() {
        let mut bytes = Envelope { origins: Vec::new(), ..envelope() }.encode();
        bytes[4] = WITHOUT_ORIGINS;
        bytes.drain(HEADER_BYTES - 4..HEADER_BYTES);
        assert_eq!(Envelope::decode(&bytes), Ok(Envelope { origins: Vec::new(), ..envelope() }));
    }

    #[test]
    fn foreign_and_damaged_states_are_refused() {
        let bytes = envelope().encode();
        for length in 0..HEADER_BYTES + 2 * 8 {
            assert!(Envelope::decode(&bytes[..length]).is_err());
        }
        for (at, value) in [(0, b'X'), (4, 3), (13, 0xFF), (38, 0), (61, 0x80), (HEADER_BYTES - 2, 1)] {
            let mut damaged = bytes.clone();
            damaged[at] = value;
            if at == 38 {
                damaged[38..46].fill(0);
            }
            assert!(Envelope::decode(&damaged).is_err(), "byte {at}");
        }
        assert!(Envelope::decode(b"").unwrap_err().remedy.contains("resume"));
    }
}
