//! A transformer block, pre-norm as in GPT-2: forward, and a hand-written backward.

use super::{Tensor, attention, config::Shape, product::Real, rows};

/// Tensors inside a block that its backward pass needs.
pub(super) struct Saved<T> {
    input: Tensor<T>,
    normal1: Tensor<T>,
    attention: Vec<attention::Saved<T>>,
    attended: Tensor<T>,
    middle: Tensor<T>,
    normal2: Tensor<T>,
    /// Expanded rows, before their bias and the nonlinearity.
    expanded: Tensor<T>,
    hidden: Tensor<T>,
}

impl<T> Saved<T> {
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
        tensors.map(Tensor::bytes).sum()
    }
}

pub(super) fn forward<T: Real>(x: &Tensor<T>, weights: &[Tensor<T>], shape: &Shape) -> (Tensor<T>, Saved<T>) {
    let [
        norm1_gain,
        norm1_bias,
        attention_in,
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
        unreachable!("a block has twelve parameters")
    };
    let normal1 = norm(x, norm1_gain, norm1_bias);
    let projected = normal1.times(attention_in);
    let (attended, attention) = attention::forward(&projected, attention_bias, shape);
    drop(projected);
    let middle = add_branch(x, &attended.times(project), project_bias);

    let normal2 = norm(&middle, norm2_gain, norm2_bias);
    let expanded = normal2.times(expand);
    let hidden = expanded.like(rows::gelu(expanded.values(), expand_bias.values()));
    let y = add_branch(&middle, &hidden.times(contract), contract_bias);
    (y, Saved { input: x.clone(), normal1, attention, attended, middle, normal2, expanded, hidden })
}

pub(super) fn norm<T: Real>(x: &Tensor<T>, gain: &Tensor<T>, bias: &Tensor<T>) -> Tensor<T> {
    x.like(rows::norm(x.values(), gain.values(), bias.values()))
}

fn add_branch<T: Real>(x: &Tensor<T>, branch: &Tensor<T>, bias: &Tensor<T>) -> Tensor<T> {
    x.like(rows::residual(x.values(), branch.values(), bias.values()))
}

/// Returns the gradients of the block's input, and of its parameters in registration order.
pub(super) fn backward<T: Real>(
    saved: &Saved<T>,
    weights: &[Tensor<T>],
    dy: &Tensor<T>,
    shape: &Shape,
) -> (Tensor<T>, Vec<Tensor<T>>) {
    let [norm1_gain, _, attention_in, _, project, _, norm2_gain, _, expand, expand_bias, contract, _] =
        weights
    else {
        unreachable!("a block has twelve parameters")
    };
    let dcontract_bias = bias_gradient(dy);
    let dcontract = saved.hidden.t().times(dy);
    let dhidden = dy.times(contract.t());
    let (dexpanded, dexpand_bias) =
        rows::gelu_backward(saved.expanded.values(), expand_bias.values(), dhidden.values());
    drop(dhidden);
    let (dexpanded, dexpand_bias) = (saved.expanded.like(dexpanded), Tensor::vector(dexpand_bias));
    let dexpand = saved.normal2.t().times(&dexpanded);
    let dnormal2 = dexpanded.times(expand.t());
    drop(dexpanded);
    let (dmiddle, [dgain2, dbias2]) = norm_gradient(&saved.middle, norm2_gain, &dnormal2, dy);

    let dproject_bias = bias_gradient(&dmiddle);
    let dproject = saved.attended.t().times(&dmiddle);
    let dattended = dmiddle.times(project.t());
    let dprojected = attention::backward(&saved.attention, &dattended, shape);
    let dattention_bias = bias_gradient(&dprojected);
    let dattention = saved.normal1.t().times(&dprojected);
    let dnormal1 = dprojected.times(attention_in.t());
    let (dx, [dgain1, dbias1]) = norm_gradient(&saved.input, norm1_gain, &dnormal1, &dmiddle);

    let first = [dgain1, dbias1, dattention, dattention_bias, dproject, dproject_bias];
    let second = [dgain2, dbias2, dexpand, dexpand_bias, dcontract, dcontract_bias];
    (dx, first.into_iter().chain(second).collect())
}

fn bias_gradient<T: Real>(dy: &Tensor<T>) -> Tensor<T> {
    Tensor::vector(rows::column_sums(dy.values(), dy.columns()))
}

/// Returns the gradients of a norm's input, gain and bias. The input's gradient includes the gradient of the branch
/// around the norm.
pub(super) fn norm_gradient<T: Real>(
    x: &Tensor<T>,
    gain: &Tensor<T>,
    dy: &Tensor<T>,
    around: &Tensor<T>,
) -> (Tensor<T>, [Tensor<T>; 2]) {
    let (dx, mut dgain) = rows::norm_backward(x.values(), gain.values(), dy.values(), around.values());
    let dbias = dgain.split_off(dgain.len() / 2);
    (x.like(dx), [Tensor::vector(dgain), Tensor::vector(dbias)])
}
