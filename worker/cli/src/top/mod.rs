//! `longshore top`: the status page in a terminal.

mod charts;
mod draw;
mod gather;
mod job;
mod known;
mod screen;
mod styles;
mod troubles;
mod view;

pub(crate) use self::{
    gather::Poller,
    screen::{once, watch},
};
