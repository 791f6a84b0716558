//! Python's pickles as torch writes them, read as plain data: no name in one is ever looked up, and nothing of it runs.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};

/// More objects than any state of an optimizer has, so that a pickle which repeats itself ends.
const MOST_OBJECTS: usize = 1 << 24;

/// The place of an object in its pickle. Objects may name each other, and what is made empty is filled later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id(usize);

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Object {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    /// A list or a tuple.
    Sequence(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A module's name and what it has.
    Name(String, String),
    /// What torch keeps beside the pickle, as the pickle speaks of it.
    Persistent(Id),
    /// What a call of a name with these arguments would give.
    Call(Id, Id),
}

/// What a pickle has.
pub(super) struct Pickle {
    objects: Vec<Object>,
    root: Id,
}

impl Pickle {
    pub(super) fn read(bytes: &[u8]) -> anyhow::Result<Pickle> {
        let mut machine =
            Machine { rest: bytes, objects: Vec::new(), stack: Vec::new(), memo: BTreeMap::new() };
        let root = machine
            .run()
            .with_context(|| format!("at byte {} of its pickle", bytes.len() - machine.rest.len()))?;
        Ok(Pickle { objects: machine.objects, root })
    }

    pub(super) fn root(&self) -> Id {
        self.root
    }

    /// An object; behind calls of `OrderedDict` what they were given.
    pub(super) fn get(&self, id: Id) -> &Object {
        &self.objects[id.0]
    }

    pub(super) fn text(&self, id: Id) -> Option<&str> {
        match self.get(id) {
            Object::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn int(&self, id: Id) -> Option<i64> {
        match *self.get(id) {
            Object::Int(value) => Some(value),
            _ => None,
        }
    }

    pub(super) fn items(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Object::Sequence(items) => Some(items),
            _ => None,
        }
    }

    pub(super) fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Object::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// What a dict has under a name.
    pub(super) fn entry(&self, dict: Id, name: &str) -> Option<Id> {
        let entries = self.entries(dict)?;
        entries.iter().rev().find(|(key, _)| self.text(*key) == Some(name)).map(|&(_, value)| value)
    }

    /// A call, as the name and the arguments.
    pub(super) fn call(&self, id: Id) -> Option<((&str, &str), &[Id])> {
        let Object::Call(name, arguments) = *self.get(id) else { return None };
        Some((self.name(name)?, self.items(arguments)?))
    }

    pub(super) fn name(&self, id: Id) -> Option<(&str, &str)> {
        match self.get(id) {
            Object::Name(module, name) => Some((module, name)),
            _ => None,
        }
    }
}

enum Entry {
    Object(Id),
    Mark,
}

/// The stack machine that a pickle is a program for.
struct Machine<'a> {
    rest: &'a [u8],
    objects: Vec<Object>,
    stack: Vec<Entry>,
    memo: BTreeMap<u64, Id>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> anyhow::Result<Id> {
        loop {
            let code = self.bytes(1)?[0];
            if code == b'.' {
                return self.pop();
            }
            self.step(code)?;
            ensure!(self.objects.len() <= MOST_OBJECTS, "it has more than {MOST_OBJECTS} objects");
        }
    }

    fn step(&mut self, code: u8) -> anyhow::Result<()> {
        match code {
            0x80 => self.bytes(1).map(|_| ())?,
            0x95 => self.bytes(8).map(|_| ())?,
            b'(' => self.stack.push(Entry::Mark),
            b'0' => self.pop().map(|_| ())?,
            b'1' => drop(self.since_mark()?),
            b'N' => self.push(Object::None),
            0x88 => self.push(Object::Bool(true)),
            0x89 => self.push(Object::Bool(false)),
            b'K' | b'M' | b'J' | 0x8a | b'G' => {
                let number = self.number(code)?;
                self.push(number);
            }
            b'X' | 0x8c | 0x8d | b'U' | b'T' | b'C' | b'B' | 0x8e => {
                let text = self.string(code)?;
                self.push(Object::Text(text));
            }
            b'}' => self.push(Object::Dict(Vec::new())),
            b']' | b')' => self.push(Object::Sequence(Vec::new())),
            b't' | b'l' => {
                let items = self.since_mark()?;
                self.push(Object::Sequence(items));
            }
            0x85..=0x87 => {
                let items = self.last(usize::from(code - 0x84))?;
                self.push(Object::Sequence(items));
            }
            b'd' => {
                let items = self.since_mark()?;
                self.push(Object::Dict(pairs(&items)?));
            }
            b's' | b'u' | b'a' | b'e' => self.fill(code)?,
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.remember(code)?,
            _ => self.made(code)?,
        }
        Ok(())
    }

    /// Names, calls, and what stands beside the pickle.
    fn made(&mut self, code: u8) -> anyhow::Result<()> {
        match code {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Object::Name(module, name));
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let text = |id: Id| match &self.objects[id.0] {
                    Object::Text(text) => Ok(text.clone()),
                    _ => bail!("a name is no text"),
                };
                let named = Object::Name(text(module)?, text(name)?);
                self.push(named);
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Object::Persistent(id));
            }
            b'R' | 0x81 => {
                let (arguments, name) = (self.pop()?, self.pop()?);
                let is_dict = matches!(&self.objects[name.0], Object::Name(_, name) if name == "OrderedDict");
                self.push(if is_dict { Object::Dict(Vec::new()) } else { Object::Call(name, arguments) });
            }
            // What an object gets beside its arguments says nothing of tensors.
            b'b' => self.pop().map(|_| ())?,
            _ => bail!("it has the operation {code:#04x}, which no file of torch's has"),
        }
        Ok(())
    }

    fn number(&mut self, code: u8) -> anyhow::Result<Object> {
        Ok(match code {
            b'K' => Object::Int(self.bytes(1)?[0].into()),
            b'M' => Object::Int(u16::from_le_bytes(self.array()?).into()),
            b'J' => Object::Int(i32::from_le_bytes(self.array()?).into()),
            b'G' => Object::Float(f64::from_be_bytes(self.array()?)),
            _ => {
                let count = self.bytes(1)?[0].into();
                let bytes = self.bytes(count)?;
                ensure!(bytes.len() <= 8, "it has a number of {} bytes", bytes.len());
                let sign = bytes.last().map_or(0, |last| if last & 0x80 == 0 { 0 } else { 0xff });
                let mut whole = [sign; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                Object::Int(i64::from_le_bytes(whole))
            }
        })
    }

    fn string(&mut self, code: u8) -> anyhow::Result<String> {
        let length = match code {
            0x8c | b'U' | b'C' => self.bytes(1)?[0].into(),
            0x8d | 0x8e => u64::from_le_bytes(self.array()?),
            _ => u32::from_le_bytes(self.array()?).into(),
        };
        let bytes = self.bytes(usize::try_from(length)?)?;
        // Bytes that are no text are no name of anything either.
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// Puts what is above it on the stack into a list or a dict.
    fn fill(&mut self, code: u8) -> anyhow::Result<()> {
        let items = match code {
            b's' => self.last(2)?,
            b'a' => self.last(1)?,
            _ => self.since_mark()?,
        };
        let Some(Entry::Object(target)) = self.stack.last() else { bail!("nothing is there to be filled") };
        match (&mut self.objects[target.0], code) {
            (Object::Dict(entries), b's' | b'u') => entries.extend(pairs(&items)?),
            (Object::Sequence(list), b'a' | b'e') => list.extend(items),
            // Entries of what a call gives, such as a subclass of dict.
            _ => {}
        }
        Ok(())
    }

    fn remember(&mut self, code: u8) -> anyhow::Result<()> {
        let key = match code {
            b'q' | b'h' => self.bytes(1)?[0].into(),
            0x94 => self.memo.len() as u64,
            _ => u32::from_le_bytes(self.array()?).into(),
        };
        if matches!(code, b'h' | b'j') {
            let id = *self.memo.get(&key).with_context(|| format!("nothing was remembered as {key}"))?;
            self.stack.push(Entry::Object(id));
            return Ok(());
        }
        let Some(&Entry::Object(id)) = self.stack.last() else { bail!("nothing is there to be remembered") };
        self.memo.insert(key, id);
        Ok(())
    }

    fn push(&mut self, object: Object) {
        self.stack.push(Entry::Object(Id(self.objects.len())));
        self.objects.push(object);
    }

    fn pop(&mut self) -> anyhow::Result<Id> {
        match self.stack.pop() {
            Some(Entry::Object(id)) => Ok(id),
            _ => bail!("its stack is empty"),
        }
    }

    fn last(&mut self, count: usize) -> anyhow::Result<Vec<Id>> {
        let mut items = (0..count).map(|_| self.pop()).collect::<anyhow::Result<Vec<Id>>>()?;
        items.reverse();
        Ok(items)
    }

    fn since_mark(&mut self) -> anyhow::Result<Vec<Id>> {
        let mut items = Vec::new();
        loop {
            match self.stack.pop() {
                Some(Entry::Object(id)) => items.push(id),
                Some(Entry::Mark) => break,
                None => bail!("its stack has no mark"),
            }
        }
        items.reverse();
        Ok(items)
    }

    fn bytes(&mut self, count: usize) -> anyhow::Result<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count).context("it ends early")?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const BYTES: usize>(&mut self) -> anyhow::Result<[u8; BYTES]> {
        Ok(self.bytes(BYTES)?.try_into()?)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let end = self.rest.iter().position(|&byte| byte == b'\n').context("it ends early")?;
        let line = String::from_utf8_lossy(self.bytes(end)?).into_owned();
        self.bytes(1)?;
        Ok(line)
    }
}

fn pairs(items: &[Id]) -> anyhow::Result<Vec<(Id, Id)>> {
    let (pairs, rest) = items.as_chunks::<2>();
    ensure!(rest.is_empty(), "a key of a dict has no value");
    Ok(pairs.iter().map(|&[key, value]| (key, value)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_dict_that_python_wrote_is_read() {
        // pickle.dumps({"state": {0: (1.5, None)}, "names": ["a", "a"]}, 2)
        let bytes = b"\x80\x02}q\x00(X\x05\x00\x00\x00stateq\x01}q\x02K\x00G?\xf8\x00\x00\x00\x00\x00\x00N\x86q\x03sX\x05\x00\x00\x00namesq\x04]q\x05(X\x01\x00\x00\x00aq\x06h\x06eu.";
        let pickle = Pickle::read(bytes).unwrap();
        let state = pickle.entry(pickle.root(), "state").unwrap();
        let [(key, value)] = *pickle.entries(state).unwrap() else { panic!() };
        assert_eq!(pickle.int(key), Some(0));
        let [number, none] = *pickle.items(value).unwrap() else { panic!() };
        assert_eq!((pickle.get(number), pickle.get(none)), (&Object::Float(1.5), &Object::None));
        let names = pickle.items(pickle.entry(pickle.root(), "names").unwrap()).unwrap();
        assert_eq!(names.iter().map(|&name| pickle.text(name).unwrap()).collect::<Vec<_>>(), ["a", "a"]);
    }

    #[test]
    fn numbers_have_their_sign() {
        for (bytes, value) in [
            (&b"\x8a\x01\xff."[..], -1),
            (b"\x8a\x02\xff\x00.", 255),
            (b"\x8a\x00.", 0),
            (b"J\xfe\xff\xff\xff.", -2),
        ] {
            let pickle = Pickle::read(bytes).unwrap();
            assert_eq!(pickle.int(pickle.root()), Some(value));
        }
    }

    proptest! {
        /// Whatever the bytes are, reading them ends.
        #[test]
        fn no_bytes_are_too_bad(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Pickle::read(&bytes);
        }

        /// The same for operations that follow on each other.
        #[test]
        fn no_operations_are_too_bad(codes in prop::collection::vec(prop::sample::select(&b"(N}])tsuaeqh0q\x85\x86\x87R\x81bQ\x94\x00"[..]), 0..200)) {
            let _ = Pickle::read(&[&codes[..], b"."].concat());
        }
    }
}
