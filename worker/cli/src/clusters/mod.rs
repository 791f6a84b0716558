//! Clusters by name: what a client's config file says of them, and which one a command means.

mod choice;
mod file;

pub(crate) use self::{
    choice::{Given, Wanted, choose},
    file::File,
};
