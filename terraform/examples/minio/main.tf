terraform {
  required_version = ">= 1.9"

  required_providers {
    minio = {
      source  = "aminueza/minio"
      version = ">= 3.0"
    }
  }
}

# Credentials of an administrator come from MINIO_USER and MINIO_PASSWORD.
provider "minio" {
  minio_server = "minio.example:9000"
  minio_ssl    = true
}

module "cache" {
  source = "../../modules/minio"

  bucket_name = "encoder-cache"
  endpoint    = "https://minio.example:9000"
}

output "environment" {
  description = "What a server needs to find the cache, but for its credentials."
  value       = module.cache.environment.writer
}

output "credentials" {
  description = "The server's access keys."
  value       = module.cache.credentials.writer
  sensitive   = true
}
