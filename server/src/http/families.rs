//! Metric families with one or two labels, written while their samples are looked up.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, NoLabelSet},
    metrics::{MetricType, histogram::Histogram},
    registry::Unit,
};

/// Labels of one sample.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Returns the only sample of a family without labels.
pub(super) fn one<V>(value: V) -> [(Labels, V); 1] {
    [(Labels::new(), value)]
}

/// Returns the labels with one more.
pub(super) fn with(mut labels: Labels, name: &'static str, value: impl ToString) -> Labels {
    labels.push((name, value.to_string()));
    labels
}

/// Writer of families in sequence. The first failure ends the scrape.
pub(super) struct Families<'a> {
    pub(super) encoder: DescriptorEncoder<'a>,
}

impl Families<'_> {
    pub(super) fn gauge<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        samples.into_iter().try_for_each(|(labels, value)| match labels.is_empty() {
            true => family.encode_gauge(&value),
            false => family.encode_family(&labels)?.encode_gauge(&value),
        })
    }

    /// Writes a counter. `name` is without the suffix `_total`.
    pub(super) fn counter<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        samples.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
        })
    }

    pub(super) fn histogram<'a>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, &'a Histogram)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Histogram)?;
        samples.into_iter().try_for_each(|(labels, value)| value.encode(family.encode_family(&labels)?))
    }

    /// Writes histograms counted elsewhere: each has a sum, and buckets with their upper bounds.
    pub(super) fn buckets(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, f64, Vec<(f64, u64)>)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Histogram)?;
        samples.into_iter().try_for_each(|(labels, sum, buckets)| {
            let count = buckets.iter().map(|(_, count)| count).sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }
}
