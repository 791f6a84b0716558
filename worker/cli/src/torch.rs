//! What torch calls the state of its optimizers.

use longshore_proto::Rule;

/// The arrays beside the weights, in the order of [`StateArray`](longshore_proto::StateArray).
pub(crate) fn moments(rule: Rule) -> &'static [&'static str] {
    match rule {
        Rule::AdamW | Rule::Adam => &["exp_avg", "exp_avg_sq"],
        Rule::Sgd => &["momentum_buffer"],
        Rule::Lion => &["exp_avg"],
        Rule::Adagrad => &["sum"],
    }
}

/// Whether it counts the steps of each parameter.
pub(crate) fn counts_steps(rule: Rule) -> bool {
    !matches!(rule, Rule::Sgd | Rule::Lion)
}
