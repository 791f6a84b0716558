//! Which parameters a unit has, and where they lie in its memory.

use std::ops::Range;

use longshore_proto::{JobSpec, Layout, limits::ALIGN_ELEMENTS};

use crate::error::{Result, UnitError};

/// The parameters that are acquired and released together, usually a transformer block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// The unit's name in errors.
    pub name: String,
    /// Indices of the job's parameters. They are best in forward order, since they are pulled so.
    pub params: Vec<usize>,
}

/// A unit and its flat ranges, which lie one after the other in its memory.
pub(super) struct Place {
    pub(super) unit: Unit,
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) elements: u64,
}

impl Place {
    /// Finds the places of all units.
    ///
    /// # Errors
    /// `Unit` for a unit without parameters, a parameter that is not there, one in two units, or a trained one in none.
    pub(super) fn all(units: Vec<Unit>, spec: &JobSpec, layout: &Layout) -> Result<Vec<Place>> {
        let mut owners: Vec<Option<usize>> = vec![None; spec.params.len()];
        for (index, Unit { name, params }) in units.iter().enumerate() {
            if params.is_empty() {
                return Err(UnitError::Empty { unit: name.clone() }.into());
            }
            for &param in params {
                let Some(owner) = owners.get_mut(param) else {
                    let (unit, params) = (name.clone(), spec.params.len());
                    return Err(UnitError::NoSuchParameter { unit, param, params }.into());
                };
                if let Some(first) = owner.replace(index) {
                    let (first, second) = (units[first].name.clone(), name.clone());
                    let param = spec.params[param].name.clone();
                    return Err(UnitError::Shared { param, first, second }.into());
                }
            }
        }
        let is_uncovered = |param: &usize| owners[*param].is_none() && !layout.is_param_frozen(*param);
        if let Some(param) = (0..owners.len()).find(is_uncovered) {
            return Err(UnitError::Uncovered { param: spec.params[param].name.clone() }.into());
        }
        Ok(units.into_iter().map(|unit| Place::of(unit, layout)).collect())
    }

    fn of(unit: Unit, layout: &Layout) -> Place {
        let mut params: Vec<Range<u64>> =
            unit.params.iter().map(|&param| layout.param_range(param)).collect();
        params.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in params {
            // Neighbours are one range: there is less than an alignment of padding between them.
            match ranges.last_mut().filter(|last| range.start - last.end < ALIGN_ELEMENTS) {
                Some(last) => last.end = range.end,
                None => ranges.push(range),
            }
        }
        let elements = ranges.iter().map(|range| range.end - range.start).sum();
        Place { unit, ranges, elements }
    }

    /// The elements of a flat range, counted from the start of the unit's memory.
    pub(super) fn within(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let mut before = 0;
        for own in &self.ranges {
            if own.start <= range.start && range.end <= own.end {
                let start = before + range.start - own.start;
                return Some(start..start + range.end - range.start);
            }
            before += own.end - own.start;
        }
        None
    }
}
