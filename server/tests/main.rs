//! The server's tests through its public objects, as one program.

mod clients;
mod start;
