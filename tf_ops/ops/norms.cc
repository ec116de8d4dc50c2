// Norms of many tensors in one call, whole or by blocks. Their Python face is hvd_ext/tensorflow/norms.py.
#include "kernels/norms.h"

#include <algorithm>
#include <vector>

#include "kernels/sketch.h"
#include "ops/dtype.h"
#include "ops/gpu_kernels.h"
#include "ops/kernel_parts.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_ext {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("HvdExt>SquaredNorms")
    .Input("tensors: N * T")
    .Output("squares: double")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
The sum of the squares of each tensor, in the order that tf_ops/kernels/norms.h defines.

tensors: of any shapes.
squares: one for each tensor.
)doc");

REGISTER_OP("HvdExt>BlockSquares")
    .Input("tensors: N * T")
    .Input("blocks: int64")
    .Output("squares: double")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle blocks;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 1, &blocks));
      c->set_output(0, blocks);
      return absl::OkStatus();
    })
    .Doc(R"doc(
The sums of the squares of some blocks of tensors.

tensors: of any shapes.
blocks: which blocks; those of all tensors are counted from 0, one tensor after the other.
squares: one for each of them.
)doc");

REGISTER_OP("HvdExt>AddBlocks")
    .Input("squares: double")
    .Output("sums: double")
    .Attr("counts: list(int) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> counts;
      TF_RETURN_IF_ERROR(c->GetAttr("counts", &counts));
      c->set_output(0, c->Vector(static_cast<int64_t>(counts.size())));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Adds the blocks of each tensor in their order: with those of BlockSquares the result is that of SquaredNorms.

squares: of all blocks of all tensors.
sums: one for each tensor.
counts: the number of blocks of each tensor.
)doc");

REGISTER_OP("HvdExt>Sketches")
    .Input("tensors: N * float")
    .Input("signs: uint32")
    .Input("block_signs: uint32")
    .Output("sketches: float")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(c->num_inputs() - 2, kSketch));
      return absl::OkStatus();
    })
    .Doc(R"doc(
A short vector of signed sums of each tensor, as tf_ops/kernels/sketch.h defines it.

tensors: of any shapes.
signs: those of the elements of a block, in words.
block_signs: those of the sums of whole blocks, in words.
sketches: one row for each tensor.
)doc");

// Sets sums(i) to the sum of the squares of the next counts[i] blocks.
void SumUp(const double* squares, const std::vector<int64_t>& counts, Tensor* sums) {
  for (size_t i = 0; i < counts.size(); squares += counts[i++]) {
    sums->vec<double>()(static_cast<int64_t>(i)) = NormSum(squares, counts[i]);
  }
}

std::vector<NormBlock> BlocksOf(const OpInputList& tensors) {
  std::vector<NormBlock> blocks;
  for (const Tensor& tensor : tensors) {
    const int64_t elements = tensor.NumElements();
    const char* data = tensor.tensor_data().data();
    const int64_t size = tensorflow::DataTypeSize(tensor.dtype());
    for (int64_t begin = 0; begin < elements; begin += kNormBlock) {
      blocks.push_back({data + begin * size, std::min(kNormBlock, elements - begin)});
    }
  }
  return blocks;
}

// Sets squares[i] to the sum of the squares of tensors[i]; both lie in the memory of the op's GPU.
absl::Status SquaresOnGpu(OpKernelContext* context, const std::vector<HvdExtNormsTensor>& tensors, double* squares) {
  const int32_t dtype = static_cast<int32_t>(FromTensorFlow(context->input_dtype(0)));
  const int64_t n = static_cast<int64_t>(tensors.size());
  return OnGpu(
      context, [&](const GpuKernels& kernels) { return kernels.norms_workspace(tensors.data(), n); },
      [&](const GpuKernels& kernels, void* workspace, int64_t nbytes) {
        return kernels.norms(dtype, tensors.data(), n, squares, workspace, nbytes, StreamOf(context));
      });
}

class SquaredNormsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({tensors.size()}), &output));
    if (StreamOf(context) != nullptr) {
      std::vector<HvdExtNormsTensor> all;
      for (const Tensor& tensor : tensors) all.push_back({tensor.tensor_data().data(), tensor.NumElements()});
      OP_REQUIRES_OK(context, SquaresOnGpu(context, all, output->vec<double>().data()));
      return;
    }
    const std::vector<NormBlock> blocks = BlocksOf(tensors);
    std::vector<double> sums(blocks.size());
    const int64_t n_blocks = static_cast<int64_t>(blocks.size());
    NormSquares(FromTensorFlow(context->input_dtype(0)), blocks.data(), n_blocks, WorkersOf(context), sums.data());
    std::vector<int64_t> counts;
    for (const Tensor& tensor : tensors) counts.push_back(NormBlocks(tensor.NumElements()));
    SumUp(sums.data(), counts, output);
  }
};

class BlockSquaresOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    const Tensor& wanted = context->input(context->num_inputs() - 1);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, wanted.shape(), &output));
    const std::vector<NormBlock> all = BlocksOf(tensors);
    std::vector<NormBlock> blocks;
    for (int64_t i = 0; i < wanted.NumElements(); ++i) {
      const int64_t block = wanted.vec<int64_t>()(i);
      OP_REQUIRES(context, block >= 0 && block < static_cast<int64_t>(all.size()),
                  Invalid("blocks (", block, "): must be from 0 and below ", all.size(), ", the number of blocks"));
      blocks.push_back(all[static_cast<size_t>(block)]);
    }
    if (StreamOf(context) != nullptr) {  // a tensor of one block has the sum of the block
      std::vector<HvdExtNormsTensor> tensors_of_blocks;
      for (const NormBlock& block : blocks) tensors_of_blocks.push_back({block.data, block.elements});
      OP_REQUIRES_OK(context, SquaresOnGpu(context, tensors_of_blocks, output->vec<double>().data()));
      return;
    }
    NormSquares(FromTensorFlow(context->input_dtype(0)), blocks.data(), static_cast<int64_t>(blocks.size()),
                WorkersOf(context), output->vec<double>().data());
  }
};

class AddBlocksOp : public OpKernel {
 public:
  explicit AddBlocksOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("counts", &counts_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& squares = context->input(0);
    int64_t total = 0;
    for (int64_t count : counts_) total += count;
    OP_REQUIRES(context, squares.NumElements() == total,
                Invalid("squares (", squares.NumElements(), "): must be one for each block; there are ", total));
    Tensor* output = nullptr;
    const int64_t n = static_cast<int64_t>(counts_.size());
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &output));
    SumUp(squares.flat<double>().data(), counts_, output);
  }

 private:
  std::vector<int64_t> counts_;
};

class SketchesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OpInputList inputs;
    OP_REQUIRES_OK(context, context->input_list("tensors", &inputs));
    const Tensor& signs = context->input(context->num_inputs() - 2);
    const Tensor& block_signs = context->input(context->num_inputs() - 1);
    std::vector<SketchTensor> tensors;
    int64_t whole = 0;
    for (const Tensor& one : inputs) {
      tensors.push_back({one.flat<float>().data(), one.NumElements()});
      whole = std::max(whole, one.NumElements() / kNormBlock);
    }
    OP_REQUIRES_OK(context, Enough("signs", signs, kNormBlock / kSketch));
    OP_REQUIRES_OK(context, Enough("block_signs", block_signs, whole));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({inputs.size(), kSketch}), &output));
    NormSketches(tensors.data(), inputs.size(), signs.flat<uint32_t>().data(), block_signs.flat<uint32_t>().data(),
                 WorkersOf(context), output->flat<float>().data());
  }

 private:
  static absl::Status Enough(const char* name, const Tensor& signs, int64_t rows) {
    if (signs.NumElements() >= NormSignWords(rows)) return absl::OkStatus();
    return Invalid(name, " (", signs.NumElements(), " words): must be at least ", NormSignWords(rows), ", for ", rows,
                   " rows of ", kSketch);
  }
};

REGISTER_KERNEL_BUILDER(Name("HvdExt>SquaredNorms").Device(tensorflow::DEVICE_CPU), SquaredNormsOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>BlockSquares").Device(tensorflow::DEVICE_CPU), BlockSquaresOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>AddBlocks").Device(tensorflow::DEVICE_CPU), AddBlocksOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>Sketches").Device(tensorflow::DEVICE_CPU), SketchesOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>SquaredNorms").Device(tensorflow::DEVICE_GPU), SquaredNormsOp);
REGISTER_KERNEL_BUILDER(Name("HvdExt>BlockSquares").Device(tensorflow::DEVICE_GPU).HostMemory("blocks"),
                        BlockSquaresOp);

}  // namespace
}  // namespace hvd_ext
