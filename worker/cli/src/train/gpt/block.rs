//! A transformer block, pre-norm as in GPT-2: forward, and backward written out by hand.

use candle_core::{Result, Tensor};

use super::{
    attention,
    rows::{self, Real},
    stages::{Shape, like, matrix, read, vector},
};

/// A block's parameters, in registration order.
struct Parameters<'a> {
    norm1_gain: &'a Tensor,
    norm1_bias: &'a Tensor,
    attention: &'a Tensor,
    attention_bias: &'a Tensor,
    project: &'a Tensor,
    project_bias: &'a Tensor,
    norm2_gain: &'a Tensor,
    norm2_bias: &'a Tensor,
    expand: &'a Tensor,
    expand_bias: &'a Tensor,
    contract: &'a Tensor,
    contract_bias: &'a Tensor,
}

impl<'a> Parameters<'a> {
    fn new(weights: &'a [Tensor]) -> Parameters<'a> {
        let [
            norm1_gain,
            norm1_bias,
            attention,
            attention_bias,
            project,
            project_bias,
            norm2_gain,
            norm2_bias,
            expand,
            expand_bias,
            contract,
            contract_bias,
        ] = weights
        else {
            unreachable!("the count was checked against the layout when the weights were acquired")
        };
        Parameters {
            norm1_gain,
            norm1_bias,
            attention,
            attention_bias,
            project,
            project_bias,
            norm2_gain,
            norm2_bias,
            expand,
            expand_bias,
            contract,
            contract_bias,
        }
    }
}

/// Everything inside a block that its backward pass needs.
pub(super) struct Saved {
    input: Tensor,
    normal1: Tensor,
    attention: Vec<attention::Saved>,
    attended: Tensor,
    middle: Tensor,
    normal2: Tensor,
    /// Before its bias and the nonlinearity.
    expanded: Tensor,
    hidden: Tensor,
}

impl Saved {
    pub(super) fn bytes(&self) -> usize {
        let own = [
            &self.input,
            &self.normal1,
            &self.attended,
            &self.middle,
            &self.normal2,
            &self.expanded,
            &self.hidden,
        ];
        let tensors = own.into_iter().chain(self.attention.iter().flat_map(attention::Saved::tensors));
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }
}

pub(super) fn forward<T: Real>(x: &Tensor, weights: &[Tensor], shape: &Shape) -> Result<(Tensor, Saved)> {
    let p = Parameters::new(weights);
    let normal1 =
        read::<T, _, _>([x, p.norm1_gain, p.norm1_bias], |[x, gain, bias]| rows::norm(x, gain, bias))?;
    let normal1 = like(normal1, x)?;
    let projected = normal1.matmul(p.attention)?;
    let (attended, attention) = attention::forward::<T>(&projected, p.attention_bias, shape)?;
    drop(projected);
    let middle = add_branch::<T>(x, &attended.matmul(p.project)?, p.project_bias)?;

    let normal2 = [&middle, p.norm2_gain, p.norm2_bias];
    let normal2 = read::<T, _, _>(normal2, |[x, gain, bias]| rows::norm(x, gain, bias))?;
    let normal2 = like(normal2, x)?;
    let expanded = normal2.matmul(p.expand)?;
    let hidden = read::<T, _, _>([&expanded, p.expand_bias], |[x, bias]| rows::gelu(x, bias))?;
    let hidden = like(hidden, &expanded)?;
    let y = add_branch::<T>(&middle, &hidden.matmul(p.contract)?, p.contract_bias)?;
    Ok((y, Saved { input: x.clone(), normal1, attention, attended, middle, normal2, expanded, hidden }))
}

fn add_branch<T: Real>(x: &Tensor, branch: &Tensor, bias: &Tensor) -> Result<Tensor> {
    like(read::<T, _, _>([x, branch, bias], |[x, branch, bias]| rows::residual(x, branch, bias))?, x)
}

/// The gradient of the block's input, and of its parameters in registration order.
pub(super) fn backward<T: Real>(
    saved: &Saved,
    weights: &[Tensor],
    dy: &Tensor,
    shape: &Shape,
) -> Result<(Tensor, Vec<Tensor>)> {
    let p = Parameters::new(weights);
    let dcontract_bias = bias_gradient::<T>(dy)?;
    let dcontract = saved.hidden.t()?.matmul(dy)?;
    let dhidden = dy.matmul(&p.contract.t()?)?;
    let gelu = [&saved.expanded, p.expand_bias, &dhidden];
    let (dexpanded, dexpand_bias) = read::<T, _, _>(gelu, |[x, bias, dy]| rows::gelu_backward(x, bias, dy))?;
    drop(dhidden);
    let (dexpanded, dexpand_bias) = (like(dexpanded, &saved.expanded)?, vector(dexpand_bias, dy)?);
    let dexpand = saved.normal2.t()?.matmul(&dexpanded)?;
    let dnormal2 = dexpanded.matmul(&p.expand.t()?)?;
    drop(dexpanded);
    let (dmiddle, [dgain2, dbias2]) = norm_gradient::<T>(&saved.middle, p.norm2_gain, &dnormal2, dy)?;

    let dproject_bias = bias_gradient::<T>(&dmiddle)?;
    let dproject = saved.attended.t()?.matmul(&dmiddle)?;
    let dattended = dmiddle.matmul(&p.project.t()?)?;
    let dprojected = attention::backward::<T>(&saved.attention, &dattended, shape)?;
    let dattention_bias = bias_gradient::<T>(&dprojected)?;
    let dattention = saved.normal1.t()?.matmul(&dprojected)?;
    let dnormal1 = dprojected.matmul(&p.attention.t()?)?;
    let (dx, [dgain1, dbias1]) = norm_gradient::<T>(&saved.input, p.norm1_gain, &dnormal1, &dmiddle)?;

    let first = [dgain1, dbias1, dattention, dattention_bias, dproject, dproject_bias];
    let second = [dgain2, dbias2, dexpand, dexpand_bias, dcontract, dcontract_bias];
    Ok((dx, first.into_iter().chain(second).collect()))
}

fn bias_gradient<T: Real>(dy: &Tensor) -> Result<Tensor> {
    let width = dy.dim(1)?;
    vector(read::<T, _, _>([dy], |[dy]| rows::column_sums(dy, width))?, dy)
}

/// The gradients of a norm's input, with that of the branch around the norm added, and of its gain and bias.
pub(super) fn norm_gradient<T: Real>(
    x: &Tensor,
    gain: &Tensor,
    dy: &Tensor,
    around: &Tensor,
) -> Result<(Tensor, [Tensor; 2])> {
    let inputs = [x, gain, dy, around];
    let (dx, mut dgain) =
        read::<T, _, _>(inputs, |[x, gain, dy, around]| rows::norm_backward(x, gain, dy, around))?;
    let dbias = dgain.split_off(dgain.len() / 2);
    Ok((matrix(dx, x.dim(1)?, x)?, [vector(dgain, x)?, vector(dbias, x)?]))
}
