//! Models in Hugging Face's formats: tensors by the `config.json` of a known family, or by safetensors files.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde_json::Value;

use super::{Model, Transformer, model::Tensor};

/// A larger header is no safetensors file: this is the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// A larger size is a typing error. So is a larger count of layers or experts, which are listed one by one.
const MAX_SIZE: u64 = 1 << 30;
const MAX_COUNT: u64 = 4096;
/// The most experts of all layers together, each of three tensors.
const MAX_EXPERTS: u64 = 1 << 16;

/// Reads a model from a `config.json`, a safetensors file, its index, or a folder with one of these.
///
/// Tensors of files are exact, so they win over a configuration beside them. If the files of an index are missing,
/// the configuration counts.
pub(crate) fn read(path: &Path) -> anyhow::Result<Model> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    let beside = |name: &str| Some(folder.join(name)).filter(|file| file.exists());
    let described = || beside("config.json").map(|config| json::<Value>(&config)).transpose();
    let file = match path.is_dir() {
        true => beside("model.safetensors.index.json").or_else(|| beside("model.safetensors")),
        false => Some(path.to_path_buf()),
    };
    let is = |file: &Path, end: &str| file.to_string_lossy().ends_with(end);
    let model = match file {
        Some(file) if is(&file, ".safetensors") => {
            of_files(&[file], described().ok().flatten().as_ref().and_then(transformer))
        }
        Some(file) if is(&file, ".safetensors.index.json") => of_index(&file, described()?.as_ref()),
        Some(file) => json(&file).and_then(|config| of_config(&config)),
        None => match described()? {
            Some(config) => of_config(&config),
            None => bail!(
                "--model {}: there is neither config.json nor model.safetensors nor model.safetensors.index.json: name \
                 the folder of a Hugging Face model",
                path.display()
            ),
        },
    };
    model.with_context(|| format!("--model {}", path.display()))
}

fn json<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not what was expected", path.display()))
}

/// Returns the sizes in a configuration. An unknown family is an error only without tensors.
fn transformer(config: &Value) -> Option<Transformer> {
    of_config(config).ok()?.transformer
}

/// Returns the paths of an index's files. An index comes from strangers, and names files of its own folder alone.
pub(crate) fn files_of_index(index: &Path) -> anyhow::Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Index { weight_map } = json(index)?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let is_here = |name: &str| Path::new(name).file_name().is_some_and(|file| file == name);
    if let Some(name) = names.iter().find(|name| !is_here(name)) {
        bail!(
            "{} names the file {name:?}, which is not in its folder: fetch the index again",
            index.display()
        );
    }
    let folder = index.parent().unwrap_or(Path::new("."));
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn of_index(index: &Path, described: Option<&Value>) -> anyhow::Result<Model> {
    let files = files_of_index(index)?;
    let Some(missing) = files.iter().find(|file| !file.exists()) else {
        return of_files(&files, described.and_then(transformer));
    };
    let config = described.with_context(|| {
        format!(
            "{} is not there, which the index names: fetch it, or put the model's config.json beside the index",
            missing.display()
        )
    })?;
    of_config(config).with_context(|| {
        format!("{} is not there, so that config.json counts instead of the tensors", missing.display())
    })
}

/// Returns the tensors of files. Files list them alphabetically; the result has blocks in the order of their
/// numbers.
fn of_files(files: &[PathBuf], transformer: Option<Transformer>) -> anyhow::Result<Model> {
    let mut tensors = Vec::new();
    for file in files {
        let (_, metadata) =
            header(file).with_context(|| format!("cannot read the header of {}", file.display()))?;
        tensors.extend(metadata.tensors().into_iter().map(|(name, info)| {
            let shape: Vec<u64> = info.shape.iter().map(|&size| size as u64).collect();
            Tensor::new(name, &shape)
        }));
    }
    tensors.retain(|tensor| tensor.elements() > 0);
    ensure!(!tensors.is_empty(), "there are no tensors in it");
    tensors.sort_by_cached_key(|tensor| forward_order(&tensor.name));
    Ok(Model { tensors, transformer })
}

/// Sort key: embeddings first, blocks by number, and the head last.
fn forward_order(name: &str) -> (u8, Vec<(u64, String)>) {
    let is_embedding = ["embed", "wte", "wpe"].iter().any(|part| name.contains(part));
    let is_block = name.split('.').any(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
    let place = match (is_block, is_embedding) {
        (true, _) => 1,
        (false, true) => 0,
        (false, false) => 2,
    };
    let parts = name.split('.').map(|part| (part.parse().unwrap_or(0), part.to_string())).collect();
    (place, parts)
}

/// Returns a safetensors file's header, and the offset of its tensors.
pub(crate) fn header(path: &Path) -> anyhow::Result<(u64, Metadata)> {
    let mut file = File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    ensure!(
        length <= MAX_HEADER_BYTES,
        "its header would have {length} bytes, but the limit is {MAX_HEADER_BYTES}"
    );
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header)?;
    Ok((8 + length, serde_json::from_slice(&header)?))
}

struct Config<'a>(&'a Value);

impl Config<'_> {
    fn given(&self, names: &[&str]) -> anyhow::Result<Option<u64>> {
        let Some(number) = names.iter().find_map(|name| self.0.get(name)?.as_u64()) else { return Ok(None) };
        ensure!(
            (1..=MAX_SIZE).contains(&number),
            "{} is {number}, but must be from 1 to {MAX_SIZE}",
            names[0]
        );
        Ok(Some(number))
    }

    fn size(&self, names: &[&str]) -> anyhow::Result<u64> {
        self.given(names)?.with_context(|| format!("{} is missing in it", names[0]))
    }

    /// Returns a count of parts that are listed one by one.
    fn count(&self, names: &[&str]) -> anyhow::Result<u64> {
        let count = self.size(names)?;
        ensure!(count <= MAX_COUNT, "{} is {count}, but must be at most {MAX_COUNT}", names[0]);
        Ok(count)
    }

    fn is(&self, name: &str, default: bool) -> bool {
        self.0.get(name).and_then(Value::as_bool).unwrap_or(default)
    }
}

fn of_config(config: &Value) -> anyhow::Result<Model> {
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let config = Config(config);
    match family {
        "llama" | "mistral" | "qwen2" | "qwen3" | "mixtral" => llama(family, &config),
        "gpt2" => gpt2(&config),
        _ => bail!(
            "model_type is {family:?}, but the known ones are llama, mistral, qwen2, qwen3, mixtral and gpt2: name the \
             model's safetensors instead, or give --params"
        ),
    }
}

fn llama(family: &str, config: &Config<'_>) -> anyhow::Result<Model> {
    let width = config.size(&["hidden_size"])?;
    let hidden = config.size(&["intermediate_size"])?;
    let layers = config.count(&["num_hidden_layers"])?;
    let heads = config.size(&["num_attention_heads"])?;
    let key_heads = config.given(&["num_key_value_heads"])?.unwrap_or(heads);
    let head = config.given(&["head_dim"])?.unwrap_or(width / heads);
    let vocabulary = config.size(&["vocab_size"])?;
    let experts = match family {
        "mixtral" => (config.count(&["num_experts_per_tok"])?, config.count(&["num_local_experts"])?),
        _ => (1, 1),
    };
    let most = MAX_EXPERTS / layers;
    ensure!(
        experts.1 <= most,
        "num_local_experts is {}, but must be at most {most} in {layers} layers",
        experts.1
    );
    let (queries, keys) = (heads * head, key_heads * head);
    let (input_biases, output_bias) = match family {
        "qwen2" => (true, false),
        _ => (config.is("attention_bias", false), config.is("attention_bias", false)),
    };
    let mut tensors = vec![Tensor::new("model.embed_tokens.weight", &[vocabulary, width])];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[u64]| {
            tensors.push(Tensor::new(format!("model.layers.{layer}.{name}"), shape));
        };
        add("input_layernorm.weight", &[width]);
        for (name, outputs) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
            add(&format!("self_attn.{name}.weight"), &[outputs, width]);
            if input_biases {
                add(&format!("self_attn.{name}.bias"), &[outputs]);
            }
        }
        add("self_attn.o_proj.weight", &[width, queries]);
        if output_bias {
            add("self_attn.o_proj.bias", &[width]);
        }
        if family == "qwen3" {
            add("self_attn.q_norm.weight", &[head]);
            add("self_attn.k_norm.weight", &[head]);
        }
        add("post_attention_layernorm.weight", &[width]);
        if family == "mixtral" {
            add("block_sparse_moe.gate.weight", &[experts.1, width]);
            for expert in 0..experts.1 {
                add(&format!("block_sparse_moe.experts.{expert}.w1.weight"), &[hidden, width]);
                add(&format!("block_sparse_moe.experts.{expert}.w2.weight"), &[width, hidden]);
                add(&format!("block_sparse_moe.experts.{expert}.w3.weight"), &[hidden, width]);
            }
        } else {
            let bias = config.is("mlp_bias", false);
            for (name, shape) in
                [("gate_proj", [hidden, width]), ("up_proj", [hidden, width]), ("down_proj", [width, hidden])]
            {
                add(&format!("mlp.{name}.weight"), &shape);
                if bias {
                    add(&format!("mlp.{name}.bias"), &shape[..1]);
                }
            }
        }
    }
    tensors.push(Tensor::new("model.norm.weight", &[width]));
    if !config.is("tie_word_embeddings", false) {
        tensors.push(Tensor::new("lm_head.weight", &[vocabulary, width]));
    }
    Ok(Model { tensors, transformer: Some(Transformer { layers, width, vocabulary, experts }) })
}

fn gpt2(config: &Config<'_>) -> anyhow::Result<Model> {
    let width = config.size(&["n_embd", "hidden_size"])?;
    let layers = config.count(&["n_layer", "num_hidden_layers"])?;
    let vocabulary = config.size(&["vocab_size"])?;
    let positions = config.size(&["n_positions", "max_position_embeddings"])?;
    let hidden = config.given(&["n_inner"])?.unwrap_or(4 * width);
    let mut tensors = vec![
        Tensor::new("transformer.wte.weight", &[vocabulary, width]),
        Tensor::new("transformer.wpe.weight", &[positions, width]),
    ];
    for layer in 0..layers {
        let weights = [
            ("ln_1", None, width),
            ("attn.c_attn", Some(width), 3 * width),
            ("attn.c_proj", Some(width), width),
            ("ln_2", None, width),
            ("mlp.c_fc", Some(width), hidden),
            ("mlp.c_proj", Some(hidden), width),
        ];
        for (name, inputs, outputs) in weights {
            let shape: Vec<u64> = inputs.into_iter().chain([outputs]).collect();
            tensors.push(Tensor::new(format!("transformer.h.{layer}.{name}.weight"), &shape));
            tensors.push(Tensor::new(format!("transformer.h.{layer}.{name}.bias"), &[outputs]));
        }
    }
    tensors.push(Tensor::new("transformer.ln_f.weight", &[width]));
    tensors.push(Tensor::new("transformer.ln_f.bias", &[width]));
    Ok(Model { tensors, transformer: Some(Transformer { layers, width, vocabulary, experts: (1, 1) }) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Published configurations, with the parameters that their model cards name.
    fn published() -> [(Value, u64, u64); 6] {
        let llama = |width: u64, hidden: u64, key_heads: u64, vocabulary: u64| {
            json!({
                "model_type": "llama", "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": key_heads, "vocab_size": vocabulary,
                "tie_word_embeddings": false
            })
        };
        let mut mistral = llama(4096, 14336, 8, 32000);
        mistral["model_type"] = "mistral".into();
        let mut mixtral = mistral.clone();
        mixtral["model_type"] = "mixtral".into();
        mixtral["num_local_experts"] = 8.into();
        mixtral["num_experts_per_tok"] = 2.into();
        let qwen2 = json!({
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": false
        });
        let gpt2 = json!({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024});
        [
            (llama(4096, 11008, 32, 32000), 6_738_415_616, 6_738_415_616),
            (llama(4096, 14336, 8, 128_256), 8_030_261_248, 8_030_261_248),
            (mistral, 7_241_732_096, 7_241_732_096),
            (mixtral, 46_702_792_704, 12_879_925_248),
            (qwen2, 7_615_616_512, 7_615_616_512),
            (gpt2, 124_439_808, 124_439_808),
        ]
    }

    #[test]
    fn published_models_have_the_parameters_that_they_are_known_for() {
        for (config, elements, active) in published() {
            let model = of_config(&config).unwrap();
            assert_eq!((model.elements(), model.active()), (elements, active), "{config}");
            let layers = model.transformer.unwrap().layers;
            assert_eq!(model.units().len() as u64, layers + 2, "{config}");
        }
    }

    #[test]
    fn tensors_of_files_win_and_lie_in_forward_order() {
        let folder = tempfile::tempdir().unwrap();
        let data = [0u8; 12];
        let view = |shape: Vec<usize>| {
            safetensors::tensor::TensorView::new(safetensors::Dtype::F16, shape, &data).unwrap()
        };
        let write = |file: &str, names: &[&str]| {
            let views = names.iter().map(|&name| (name, view(vec![2, 3])));
            safetensors::serialize_to_file(views, None, &folder.path().join(file)).unwrap();
        };
        write("a.safetensors", &["lm_head.weight", "model.layers.10.q.weight", "model.norm.weight"]);
        write("b.safetensors", &["model.layers.2.q.weight", "model.embed_tokens.weight"]);
        let map = json!({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}});
        std::fs::write(folder.path().join("model.safetensors.index.json"), map.to_string()).unwrap();
        std::fs::write(folder.path().join("config.json"), json!({"model_type": "of_tomorrow"}).to_string())
            .unwrap();
        let model = read(folder.path()).unwrap();
        let names: Vec<_> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let expected = [
            "model.embed_tokens.weight",
            "model.layers.2.q.weight",
            "model.layers.10.q.weight",
            "lm_head.weight",
            "model.norm.weight",
        ];
        assert_eq!(names, expected);
        assert_eq!((model.elements(), model.transformer), (30, None));
    }

    /// Large files may be fetched later: a few KB describe a model.
    #[test]
    fn an_index_without_its_files_counts_by_the_configuration_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let index = folder.path().join("model.safetensors.index.json");
        let map = json!({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}});
        std::fs::write(&index, map.to_string()).unwrap();
        let said = |path: &Path| format!("{:#}", read(path).unwrap_err());
        for path in [folder.path(), &index] {
            let said = said(path);
            assert!(said.contains("model-00001-of-00002.safetensors is not there"), "{said}");
            assert!(said.contains("put the model's config.json beside the index"), "{said}");
        }
        let config = folder.path().join("config.json");
        std::fs::write(&config, json!({"model_type": "of_tomorrow"}).to_string()).unwrap();
        let unknown = said(folder.path());
        assert!(unknown.contains("is not there") && unknown.contains("of_tomorrow"), "{unknown}");
        let (described, elements, _) = &published()[0];
        std::fs::write(&config, described.to_string()).unwrap();
        for path in [folder.path(), &index] {
            let model = read(path).unwrap();
            assert_eq!((model.elements(), model.transformer.unwrap().layers), (*elements, 32));
        }
        // A part of the files is not enough.
        let data = [0u8; 4];
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F16, vec![2], &data).unwrap();
        let first = folder.path().join("model-00001-of-00002.safetensors");
        safetensors::serialize_to_file([("a", view)], None, &first).unwrap();
        assert_eq!(read(folder.path()).unwrap().elements(), *elements);
    }

    #[test]
    fn what_cannot_be_read_is_named_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let said = |path: &Path| format!("{:#}", read(path).unwrap_err());
        assert!(
            said(folder.path()).contains("name the folder of a Hugging Face model"),
            "{}",
            said(folder.path())
        );
        let config = folder.path().join("config.json");
        for (text, expected) in [
            (r#"{"model_type": "bert"}"#, "name the model's safetensors instead"),
            (r#"{"model_type": "llama", "hidden_size": 0}"#, "hidden_size is 0, but must be from 1"),
            (
                r#"{"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4096,
                    "num_attention_heads": 1, "vocab_size": 8, "num_experts_per_tok": 1, "num_local_experts": 4096}"#,
                "num_local_experts is 4096, but must be at most 16 in 4096 layers",
            ),
            ("{", "is not what was expected"),
        ] {
            std::fs::write(&config, text).unwrap();
            assert!(said(&config).contains(expected), "{text}: {}", said(&config));
        }
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, u64::MAX.to_le_bytes()).unwrap();
        assert!(said(&file).contains("but the limit is 100000000"), "{}", said(&file));
    }
}
