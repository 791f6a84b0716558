//! The loops, written once for 16 lanes of any instruction set. The scalar reference does the ends of slices, which are
//! no multiple of 16 elements.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Lanes`.

mod floats;
mod lanes;
mod low;
mod moments;
mod statistics;

pub(super) use self::floats::{Kernels, cast, update, update_floats, update_low_moments, widen};
pub(super) use self::lanes::Lanes;
pub(super) use self::low::{decode, encode, update_low};
pub(super) use self::statistics::{accumulate, accumulate_statistics, statistics};

/// Makes the kernels of one instruction set out of the loops. Each is a function with the set's features
/// enabled, into which the loops and the lane operations are inlined.
macro_rules! entry_points {
    ($lanes:ty, $features:literal) => {
        entry_points! { $lanes, $features,
            update(scalars: &Scalars, gradient: Gradient, state: State, image: ImageMut);
            widen(gradient: Gradient, accumulator: &mut [f32]);
            accumulate(gradient: Gradient, accumulator: &mut [f32]);
            statistics(gradient: Gradient) -> Statistics;
            accumulate_statistics(gradient: Gradient, accumulator: &mut [f32]) -> Statistics;
            cast(source: &[f32], image: ImageMut);
            update_low(
                segments: &[(std::ops::Range<usize>, &Scalars)],
                gradient: Gradient,
                state: StateLow,
                image: ImageMut,
                random: Random
            );
            update_floats(
                scalars: &Scalars,
                gradient: Gradient,
                state: State,
                image: Option<ImageMut>
            );
            update_low_moments(
                scalars: &Scalars,
                gradient: Gradient,
                master: &mut [f32],
                moments: InLoop,
                image: Option<ImageMut>
            );
            decode(code: Code, moment: Moment, to: &mut [f32]);
            encode(code: Code, from: &[f32], codes: &mut [u8], scales: &mut [f32]);
        }

        impl vector::Kernels for $lanes {
            #[inline(always)]
            unsafe fn update_floats(s: &Scalars, g: Gradient, state: State, image: Option<ImageMut>) {
                update_floats(s, g, state, image);
            }

            #[inline(always)]
            unsafe fn update_low_moments(
                s: &Scalars,
                g: Gradient,
                master: &mut [f32],
                moments: InLoop,
                image: Option<ImageMut>,
            ) {
                update_low_moments(s, g, master, moments, image);
            }
        }
    };
    ($lanes:ty, $features:literal,
     $($function:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        /// # Safety
        /// This CPU must have the features, and slices must have the lengths that the function of this name in `kernels` checks.
        #[target_feature(enable = $features)]
        pub(in super::super) unsafe fn $function($($argument: $type),*) $(-> $result)? {
            vector::$function::<$lanes>($($argument),*)
        }
    )*};
}
pub(super) use entry_points;
