//! placeholder
pub struct CudaDevice;
