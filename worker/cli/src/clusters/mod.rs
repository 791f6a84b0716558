//! Named clusters: the entries of a client's config file, and the choice of a command's cluster.

mod choice;
mod file;

pub(crate) use self::{
    choice::{Given, Wanted, choose},
    file::File,
};
