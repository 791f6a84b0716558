//! The dynamic loss scaler. Its rules are DeepSpeed's, so a run that moves here keeps its scales. A single rule
//! differs: an overflow at the floor is an event here, where DeepSpeed raises an exception.

use longshore_proto::Fault;
use serde::{Deserialize, Serialize};

/// DeepSpeed's `fp16` settings of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScalerOptions {
    /// The first scale.
    pub initial: f64,
    /// Clean steps before the scale doubles.
    pub window: u64,
    /// Overflows before the scale halves.
    pub hysteresis: u32,
    /// True if a clean step refills the hysteresis.
    pub consecutive_hysteresis: bool,
    /// The floor.
    pub min: f64,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        LossScalerOptions {
            initial: 65536.0,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min: 1.0,
        }
    }
}

/// The effect of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The scale is unchanged.
    Kept,
    /// A window of clean steps is full: the scale was doubled.
    Raised,
    /// An overflow used up one unit of the hysteresis: the scale is unchanged.
    Held,
    /// An overflow halved the scale.
    Lowered,
    /// An overflow at the floor. A smaller scale would not help, and a person must look.
    AtFloor,
}

const FACTOR: f64 = 2.0;
/// Largest scale that clean steps raise to, 2^100. Gradients of fp32 and bf16 overflow so late that the scale would
/// otherwise leave `GRADIENT_SCALES`. Servers would then refuse the commit.
const LARGEST: f64 = (1u128 << 100) as f64;

/// The scaler with all of its state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaler {
    pub(crate) options: LossScalerOptions,
    pub(crate) dynamic: bool,
    pub(crate) scale: f64,
    pub(crate) hysteresis_left: u32,
    /// Number of updates so far.
    pub(crate) updates: u64,
    /// Index of the update with the last overflow; -1 before the first overflow.
    pub(crate) last_overflow: i64,
}

impl LossScaler {
    pub fn dynamic(options: LossScalerOptions) -> Result<LossScaler, Fault> {
        check("loss_scale.initial", options.initial)?;
        check("loss_scale.min", options.min)?;
        if options.min > options.initial {
            return Err(Fault::invalid(
                "loss_scale.min",
                options.min,
                options.initial,
                "start at or above the floor",
            ));
        }
        let at_least_one = |field: &str, value: u64| match value {
            0 => Err(Fault::invalid(
                field,
                0,
                "at least 1",
                "use DeepSpeed's defaults: window 1000, hysteresis 2",
            )),
            _ => Ok(()),
        };
        at_least_one("loss_scale.window", options.window)?;
        at_least_one("loss_scale.hysteresis", options.hysteresis.into())?;
        Ok(LossScaler {
            options,
            dynamic: true,
            scale: options.initial,
            hysteresis_left: options.hysteresis,
            updates: 0,
            last_overflow: -1,
        })
    }

    /// Makes a scaler with a constant scale: 1 for bf16 and f32, which need no scaling.
    pub fn fixed(scale: f64) -> Result<LossScaler, Fault> {
        check("loss_scale", scale)?;
        let options = LossScalerOptions { initial: scale, min: scale, ..LossScalerOptions::default() };
        Ok(LossScaler { dynamic: false, ..LossScaler::dynamic(options)? })
    }

    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Sets an operator's scale after a pause at the floor. A scale below the floor lowers the floor.
    pub fn set_scale(&mut self, scale: f64) -> Result<(), Fault> {
        check("loss_scale", scale)?;
        self.scale = scale;
        self.options.min = self.options.min.min(scale);
        Ok(())
    }

    /// Updates the scale after a step. Call it once a step, in step order.
    pub fn update(&mut self, overflow: bool) -> Event {
        let event = match (self.dynamic, overflow) {
            // A fixed scale cannot fall. DeepSpeed skips such steps for ever, and so does this scaler.
            (false, true) => Event::Held,
            (false, false) => Event::Kept,
            (true, true) => self.overflowed(),
            (true, false) => self.clean(),
        };
        self.updates += 1;
        event
    }

    fn overflowed(&mut self) -> Event {
        let event = if self.options.hysteresis == 1 || self.hysteresis_left == 1 {
            let floor = self.scale <= self.options.min;
            self.scale = (self.scale / FACTOR).max(self.options.min);
            if floor { Event::AtFloor } else { Event::Lowered }
        } else {
            self.hysteresis_left -= 1;
            Event::Held
        };
        self.last_overflow = self.updates as i64;
        event
    }

    fn clean(&mut self) -> Event {
        if self.options.consecutive_hysteresis {
            self.hysteresis_left = self.options.hysteresis;
        }
        let stable = self.updates as i64 - self.last_overflow - 1;
        if stable <= 0 || !(stable as u64).is_multiple_of(self.options.window) {
            return Event::Kept;
        }
        self.hysteresis_left = self.options.hysteresis;
        // Up to `LARGEST`, the scale times world size and micro-steps stays within `GRADIENT_SCALES`.
        self.scale = (self.scale * FACTOR).min(LARGEST.max(self.scale));
        Event::Raised
    }
}

fn check(field: &str, value: f64) -> Result<(), Fault> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Fault::invalid(field, value, "finite and above 0", "use 65536 for fp16, 1 for bf16"))
}

#[cfg(test)]
mod tests {
    use super::{Event::*, *};

    /// Worked out by hand from DeepSpeed's rules: scale 16, window 3, hysteresis 2, floor 1.
    #[test]
    fn twenty_steps_by_hand() {
        let events = [
            // stable = index - last_overflow - 1. The scale doubles at 3, 6, ... after an overflow, and 3 is first
            // reached at index 3.
            (false, Kept, 16.0),   // 0: stable 0
            (false, Kept, 16.0),   // 1: stable 1
            (false, Kept, 16.0),   // 2: stable 2
            (false, Raised, 32.0), // 3: stable 3
            (true, Held, 32.0),    // 4: hysteresis 2 -> 1
            (false, Kept, 32.0),   // 5: stable 0
            (true, Lowered, 16.0), // 6: hysteresis is not refilled by a clean step
            (true, Lowered, 8.0),  // 7: nor by a halving
            (false, Kept, 8.0),    // 8: stable 0
            (false, Kept, 8.0),    // 9: stable 1
            (false, Kept, 8.0),    // 10: stable 2
            (false, Raised, 16.0), // 11: stable 3, hysteresis refilled
            (true, Held, 16.0),    // 12: hysteresis 2 -> 1
            (true, Lowered, 8.0),  // 13
            (true, Lowered, 4.0),  // 14
            (true, Lowered, 2.0),  // 15
            (true, Lowered, 1.0),  // 16: now at the floor
            (true, AtFloor, 1.0),  // 17
            (false, Kept, 1.0),    // 18: stable 0
            (true, AtFloor, 1.0),  // 19
        ];
        let options = LossScalerOptions {
            initial: 16.0,
            window: 3,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min: 1.0,
        };
        let mut scaler = LossScaler::dynamic(options).unwrap();
        for (index, (overflow, event, scale)) in events.into_iter().enumerate() {
            assert_eq!((scaler.update(overflow), scaler.scale()), (event, scale), "event {index}");
        }
    }

    #[test]
    fn consecutive_hysteresis_is_refilled_by_a_clean_step() {
        let options = LossScalerOptions { consecutive_hysteresis: true, ..LossScalerOptions::default() };
        let mut scaler = LossScaler::dynamic(options).unwrap();
        for _ in 0..5 {
            assert_eq!(scaler.update(true), Held);
            assert_eq!(scaler.update(false), Kept);
        }
        assert_eq!(scaler.update(true), Held);
        assert_eq!(scaler.update(true), Lowered);
    }

    #[test]
    fn a_fixed_scale_stays() {
        let mut scaler = LossScaler::fixed(1.0).unwrap();
        assert_eq!((scaler.update(true), scaler.update(false), scaler.scale()), (Held, Kept, 1.0));
        assert!(LossScaler::fixed(f64::NAN).is_err() && LossScaler::fixed(0.0).is_err());
    }
}
