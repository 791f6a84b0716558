//! Cases of `longshore bench update`, with their names.

use longshore_engine::{
    kernels::{Isa, Rule},
    tier,
};
use longshore_proto::{Dtype, Formats, MasterFormat, StateFormat};

use super::super::arrays::Shape;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Update {
    pub(super) rule: Rule,
    /// Format of gradient and image.
    pub(super) wire: Dtype,
    pub(super) isa: Isa,
    pub(super) formats: Formats,
    pub(super) images: Images,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Images {
    Plain,
    /// Images that look ahead, as those of delayed steps.
    Ahead,
}

impl Update {
    /// Returns the cases. `all` means every combination. Otherwise AdamW is in every format or on every instruction
    /// set. The other rules are in bf16 on the fastest instruction set.
    pub(super) fn list(all: bool) -> Vec<Update> {
        let (best, mut cases) = (Isa::detect(), Vec::new());
        for rule in Rule::ALL {
            for wire in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                for isa in Isa::available().into_iter().rev() {
                    let fastest = (wire, isa) == (Dtype::Bf16, best);
                    let formats = FORMATS.map(|(state, master)| Formats { state, master, seed: 1 });
                    for formats in formats {
                        let adamw = rule == Rule::AdamW;
                        if all || fastest && adamw || formats.is_fp32() && (fastest || adamw) {
                            let images =
                                [Some(Images::Plain), rule.can_look_ahead().then_some(Images::Ahead)];
                            let case = |images| Update { rule, wire, isa, formats, images };
                            cases.extend(images.into_iter().flatten().map(case));
                        }
                    }
                }
            }
        }
        cases
    }

    /// AdamW with bf16 on the fastest instruction set.
    pub(in super::super) fn plain() -> Update {
        let (formats, images) = (Formats { seed: 1, ..Formats::default() }, Images::Plain);
        Update { rule: Rule::AdamW, wire: Dtype::Bf16, isa: Isa::detect(), formats, images }
    }

    pub(super) fn name(&self) -> String {
        let mut name = format!("{}/{}/{}", self.rule, self.wire, self.isa);
        if self.formats.state != StateFormat::F32 {
            name += &format!("/state-{}", self.formats.state);
        }
        if self.formats.master != MasterFormat::F32 {
            name += &format!("/master-{}", self.formats.master);
        }
        match self.images {
            Images::Plain => {}
            Images::Ahead => name += "/look-ahead",
        }
        name
    }

    pub(super) fn shape(&self) -> Shape {
        Shape { wire: self.wire, state: tier::Shape::new(self.rule, self.formats) }
    }
}

const FORMATS: [(StateFormat, MasterFormat); 5] = [
    (StateFormat::F32, MasterFormat::F32),
    (StateFormat::Bf16, MasterFormat::F32),
    (StateFormat::Block8, MasterFormat::F32),
    (StateFormat::Bf16, MasterFormat::Bf16),
    (StateFormat::Block8, MasterFormat::Bf16),
];
