//! Pickles as `torch.load` reads them, also with `weights_only=True`.

/// What a pickle is made of.
pub(super) enum Value {
    None,
    Bool(bool),
    Int(u64),
    Float(f64),
    Text(String),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// A contiguous fp32 tensor whose values are the archive's with this number.
    Tensor {
        number: usize,
        shape: Vec<u64>,
    },
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_string())
    }
}

/// A whole pickle, of protocol 2.
pub(super) fn pickle(value: &Value) -> Vec<u8> {
    let mut bytes = vec![0x80, 2];
    put(value, &mut bytes);
    bytes.push(b'.');
    bytes
}

fn put(value: &Value, bytes: &mut Vec<u8>) {
    match value {
        Value::None => bytes.push(b'N'),
        Value::Bool(value) => bytes.push(if *value { 0x88 } else { 0x89 }),
        Value::Int(value) => int(*value, bytes),
        Value::Float(value) => {
            bytes.push(b'G');
            bytes.extend(value.to_be_bytes());
        }
        Value::Text(value) => text(value, bytes),
        Value::Tuple(items) => tuple(items, bytes),
        Value::List(items) => {
            bytes.extend(b"](");
            items.iter().for_each(|item| put(item, bytes));
            bytes.push(b'e');
        }
        Value::Dict(entries) => {
            bytes.extend(b"}(");
            for (key, value) in entries {
                put(key, bytes);
                put(value, bytes);
            }
            bytes.push(b'u');
        }
        Value::Tensor { number, shape } => tensor(*number, shape, bytes),
    }
}

fn int(value: u64, bytes: &mut Vec<u8>) {
    if let Ok(value) = u8::try_from(value) {
        bytes.extend([b'K', value]);
    } else {
        // Signed: no size reaches the highest bit.
        bytes.extend([0x8a, 8]);
        bytes.extend(value.to_le_bytes());
    }
}

fn text(value: &str, bytes: &mut Vec<u8>) {
    bytes.push(b'X');
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend(value.as_bytes());
}

fn tuple(items: &[Value], bytes: &mut Vec<u8>) {
    bytes.push(b'(');
    items.iter().for_each(|item| put(item, bytes));
    bytes.push(b't');
}

/// What torch makes a tensor by, of a storage that the archive keeps beside the pickle.
fn tensor(number: usize, shape: &[u64], bytes: &mut Vec<u8>) {
    let strides = (1..=shape.len()).map(|side| shape[side..].iter().product());
    let ints = |sizes: Vec<u64>| Value::Tuple(sizes.into_iter().map(Value::Int).collect());
    bytes.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
    text("storage", bytes);
    bytes.extend(b"ctorch\nFloatStorage\n");
    text(&number.to_string(), bytes);
    text("cpu", bytes);
    int(shape.iter().product(), bytes);
    bytes.extend(b"tQ");
    int(0, bytes);
    put(&ints(shape.to_vec()), bytes);
    put(&ints(strides.collect()), bytes);
    bytes.extend(b"\x89ccollections\nOrderedDict\n)RtR");
}
