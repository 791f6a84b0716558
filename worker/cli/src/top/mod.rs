//! `longshore top`: the status page in a terminal.

mod draw;
mod gather;
mod job;
mod screen;
mod troubles;
mod view;

pub(crate) use self::{
    gather::Poller,
    screen::{once, watch},
};
