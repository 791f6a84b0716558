//! Enums whose values have names, as command lines, files and errors write them.

/// Gives an enum `ALL`, `name`, `names` and `Display` by the names of its values. With a field's name also `FromStr`, which
/// reads further names behind `|` too. The error for an unknown name states the field.
macro_rules! named {
    ($type:ident; $($value:ident = $name:literal),+ $(,)?) => {
        impl $type {
            pub const ALL: [$type; [$($type::$value),+].len()] = [$($type::$value),+];

            pub fn name(self) -> &'static str {
                match self {
                    $($type::$value => $name,)+
                }
            }

            /// Lists the names of the selected values for a text, such as `memory, shm or nvme`.
            pub fn names(selects: impl Fn($type) -> bool) -> String {
                let names: Vec<_> =
                    $type::ALL.into_iter().filter(|&value| selects(value)).map($type::name).collect();
                match names.split_last() {
                    Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
                    _ => names.concat(),
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
    ($type:ident, $field:literal; $($value:ident = $name:literal $(| $other:literal)*),+ $(,)?) => {
        $crate::named::named!($type; $($value = $name),+);

        impl std::str::FromStr for $type {
            type Err = $crate::Fault;

            fn from_str(text: &str) -> Result<$type, $crate::Fault> {
                match text {
                    $($name $(| $other)* => Ok($type::$value),)+
                    _ => {
                        let limit = format!("one of {}", [$($name),+].join(", "));
                        Err($crate::Fault::invalid($field, text, limit, "name one of them"))
                    }
                }
            }
        }
    };
}

pub(crate) use named;
