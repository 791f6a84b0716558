//! `longshore top` in a terminal, which is as it was before once it ends, however it ends.

use longshore_tests::{
    binaries,
    server::{Longshored, ServerOptions},
    skip,
    terminal::{Size, Terminal},
};

const SIZE: Size = (30, 100);

fn watch(server: &Longshored) -> Option<Terminal> {
    let mut top = binaries::command("longshore");
    top.args(["top", "--servers", server.address()]);
    let terminal = Terminal::start(&top, SIZE);
    if terminal.is_none() {
        skip::skipped("there is no script: install Debian's packages bsdutils and util-linux");
    }
    terminal
}

#[test]
fn an_interrupt_gives_the_terminal_back() {
    let server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until("an empty server", |text| text.contains("no jobs: a worker opens one"));
    terminal.keys("\x03");
    assert_eq!(terminal.ended(), 0);
}

#[test]
fn a_server_that_is_gone_ends_it_in_order() {
    let mut server = ServerOptions::new().start();
    let Some(mut terminal) = watch(&server) else { return };
    terminal.until("an empty server", |text| text.contains("no jobs: a worker opens one"));
    server.process.kill();
    terminal.until("that it is gone", |text| text.contains(server.address()) && !text.contains("reserved"));
    terminal.keys("q");
    assert_eq!(terminal.ended(), 0);
}
